"""Services that metrics and rollouts of a run go to, each by a package of its own: `[monitor] kinds` names them."""
