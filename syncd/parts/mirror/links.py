"""The steps that a mirror copies: each with its manifest, and the way from what the target has to a version."""

from collections.abc import Callable
from dataclasses import dataclass

from syncd.errors import CorruptDataError, TryAgainError
from syncd.protocol.manifest import Manifest, decode_manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Version

_DIGITS = 16


def key_of(step: int, digest: str) -> str:
    """Return the name of a step with its content, such as 120-0f1e2d3c4b5a6978."""
    return f"{step}-{digest.rpartition(':')[2][:_DIGITS]}"


@dataclass(frozen=True, slots=True)
class Link:
    """A sealed step of the source."""

    manifest: Manifest
    data: bytes  # of the manifest, as its writer has sealed it

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def key(self) -> str:
        return key_of(self.step, self.manifest.digest)

    @property
    def records(self) -> tuple[FileRecord, ...]:
        """Return all files of it, those of a shortcut too."""
        shortcut = self.manifest.shortcut
        return *self.manifest.shards, *self.manifest.files, *(shortcut.containers if shortcut else ())

    @property
    def parent(self) -> tuple[int, str] | None:
        """Return step and digest of what it is stored as changes of; the digest of an adapter's base is not known."""
        if self.manifest.parent is None:
            return None
        return self.manifest.parent, self.manifest.delta.parent_digest if self.manifest.delta else ""


def decoded_link(data: bytes, path: str, step: int) -> Link:
    manifest = decode_manifest(data, path)
    if manifest.step != step:
        raise CorruptDataError(f"it is not the manifest of step {step}", path=path)
    return Link(manifest, data)


@dataclass(frozen=True, slots=True)
class Way:
    """What is to be copied before a version can be published at the target."""

    version: Version
    links: tuple[Link, ...] = ()  # what the target has not published yet, parents first
    base: int | None = None  # the step of the target that the first of them changes
    left: int = 0  # bytes of those that are not sealed there

    @property
    def steps(self) -> list[int]:
        """Return the steps to lease at the source."""
        return [link.step for link in self.links]


def find_way(
    version: Version,
    has: Callable[[int, str], bool],
    link: Callable[[int, str], Link | None],
    is_sealed: Callable[[Link], bool],
) -> Way:
    """Return the way to a version; `has` and `is_sealed` ask the target, `link` the source, as in `ends`.

    Raises:
        TryAgainError: A step has gone at the source; only the base of an adapter may be missing.
    """
    links: list[Link] = []
    wanted: tuple[int, str] | None = (version.step, version.digest)
    base = None
    while wanted is not None:
        if has(*wanted):
            base = wanted[0]
            break
        following = link(*wanted)
        if following is None and wanted[1]:
            raise TryAgainError(f"step {wanted[0]} of the source was removed meanwhile")
        if following is None:
            break
        links.append(following)
        wanted = following.parent
    left = sum(each.manifest.size for each in links if not is_sealed(each))
    return Way(version, tuple(reversed(links)), base, left)
