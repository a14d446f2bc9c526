"""Writes batches of experiences as an explorer does: write_experiences.py JOB EXPLORER COUNT [LENGTH]

COUNT batches with one group of two rollouts each, then it ends; started again after a kill it goes on until there
have been COUNT in all. Every task names explorer and batch, so that each experience is known wherever it turns up.
"""

import sys

from support.experiences import whole_group

from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job


def main():
    root, explorer, count, *length = sys.argv[1:]
    with ExperienceWriter(Job.at(root), explorer) as writer:
        # The number that is next is the writer's own: a killed process leaves no other trace of how far it was.
        while (number := writer.upcoming) <= int(count):
            name = f"{explorer}-{number}"
            writer.write(whole_group(name, tag=name, length=int(length[0]) if length else 3))


if __name__ == "__main__":
    main()
