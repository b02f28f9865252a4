"""Ops of one row joined into stages: fewer launches, the same bits.

The planner looks for the op sequences that the stage kernels implement (``docs/architecture.md`` lists their
files) and leaves every other op as it is. Taps do not change what is joined: a stage
leaves the bits of its ops wherever a tap reads them, and a hash runs behind the step, or, where something
overwrites its source, any time before that.
"""

from kestrel.stages.planner import plan_stages

__all__ = ["plan_stages"]
