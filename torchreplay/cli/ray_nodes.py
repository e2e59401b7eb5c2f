"""The live buffers on all nodes of a Ray cluster, the shards of each `ShardedReplay` among them."""

from __future__ import annotations

import logging

import click

from torchreplay.monitoring.survey import Listed, survey
from torchreplay.ray.runtime.cluster import living_nodes, only_on
from torchreplay.ray.runtime.session import import_ray

ANSWER_SECONDS = 60.0
"""For which nodes are waited for: a new worker of Ray imports torch first."""


def survey_nodes(address: str, seconds: float) -> list[Listed]:
    """Returns the live buffers on the nodes of a cluster, looked for by a task on each.

    Args:
        address: Of the cluster, as for `ray.init`.
        seconds: Between the two looks by which rates are taken.

    Raises:
        click.ClickException: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        ray = import_ray()
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ImportError, ConnectionError, ValueError, RuntimeError) as error:
        raise click.ClickException(f"the Ray cluster at {address!r} cannot be reached: {error}") from None
    try:
        look = ray.remote(num_cpus=0, max_retries=0)(survey)
        asked = {node: look.options(scheduling_strategy=only_on(node)).remote(seconds, node) for node in living_nodes()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS)
        return _once([listed for node, answer in asked.items() for listed in _heard(ray, node, answer)])
    finally:
        ray.shutdown()


def _once(found: list[Listed]) -> list[Listed]:
    """Returns each buffer once: nodes of a cluster may share a machine."""
    known = {listed.nonce: listed for listed in reversed(found) if listed.nonce}
    return [*reversed(known.values()), *(listed for listed in found if not listed.nonce)]


def _heard(ray: object, node: str, answer: object) -> list[Listed]:
    try:
        found: list[Listed] = ray.get(answer, timeout=0)  # type: ignore[attr-defined]  # Ray has no types
    except Exception as error:  # a node that is lost, or has another environment, is no reason to show nothing
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return [Listed("?", 0, 0, "", 0, "", trouble=f"the node does not answer: {reason[-1]}", node=node)]
    return found
