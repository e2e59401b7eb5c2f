"""What the explorers of `benchmarks.pools` do: a module that every process can import."""

from benchmarks.workload import SMALL
from torchreplay.ray import ExplorerContext

POOL = 64


def explore(ctx: ExplorerContext) -> None:
    """Writes small rows, one by one, as fast as it can."""
    rows, append = SMALL.single_rows(POOL, ctx.index), ctx.writer().append
    while not ctx.stopped:
        for obs, action, reward, next_obs, done in rows:
            append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
