"""One size against eager: first each compiled piece against what was traced, then the replay against the pieces.

as traced, twice     what nothing writes shows, since memory is allocated with other contents
compiled             each compiled piece and the same piece as traced get the same inputs
replayed             the same kernels on the same values as compiled pieces without graphs
"""

from __future__ import annotations

import torch

from piecewise_backend.verifying.case import Case
from piecewise_backend.verifying.compiled import check_compiled
from piecewise_backend.verifying.replayed import check_replay
from piecewise_backend.verifying.result import Checked, Fault
from piecewise_backend.verifying.trials import Trials

_UNTRACED = (
    "compiled pieces with eager: the program was read from disk, without the graphs that it was traced as; start with "
    "options={'cache': False} to have them compared"
)


def check(case: Case) -> Checked:
    """What of `case` is wrong. Memory that the program writes, and random states, are left as they were."""
    with torch.no_grad(), torch.random.fork_rng(case.devices):
        return _run(case, Trials(case))


def _run(case: Case, trials: Trials) -> Checked:
    try:
        masks = trials.undefined()
        if not trials.program.traced:
            trials.notes.append(_UNTRACED)
        check_compiled(trials, masks)
        if case.captured is not None:
            check_replay(trials, masks)
        else:
            trials.notes.append(f"{case.size}: nothing is recorded for it")
    except Exception as error:
        trials.add(Fault.ERROR, "the check", ("", ""), None, f"{type(error).__name__}: {error}")
    finally:
        trials.saved.restore()
    return Checked(
        size=case.size,
        num_steps=len(trials.program.steps),
        compiled=trials.compiled,
        replayed=trials.replayed,
        differences=tuple(trials.found),
        notes=tuple(trials.notes),
    )
