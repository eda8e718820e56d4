"""What the commands of every engine share: checks, formats of checkpoints, and random prompts.

Flags are those that the named version of an engine documents, kept in `perfmodel/engine_flags`.
What an engine cannot do is refused in one line. Benchmarks send requests of the lengths, the
concurrency and the shared prefix of the estimate.
"""

from collections.abc import Mapping, Sequence

from perfmodel._servers import (
    Checkpoint,
    Deployment,
    Flag,
    Process,
    Server,
    host,
    kv_heads,
    latent,
    query_heads,
    refuse,
)
from perfmodel.errors import shorten

ROUNDS = 10
"""Prompts of a benchmark for each of its concurrent requests: enough for a steady state between the
first prompts, which arrive at once, and the last, which run alone (assumed)."""

METRICS = "ttft,tpot,itl,e2el"


def whole_nodes(server: Server, label: str) -> None:
    """Refuses servers that do not fill whole nodes."""
    if server.nodes > 1 and server.chips % server.per_node:
        raise refuse(
            label,
            f"{server.chips} chips of a replica do not fill whole nodes of {server.per_node}",
            str(server.nodes * server.per_node),
        )


def check_key_ranks(server: Server, model: Checkpoint, label: str) -> None:
    """Refuses keys spread over more ranks than hold copies of them, or over an uneven part."""
    group = server.tp // server.attention_dp
    copies = max(group // kv_heads(model.entry), 1)
    if server.cp > copies:
        raise refuse(
            label, f"cp {server.cp} exceeds the {copies} copies of each key head", str(copies)
        )
    shared = query_heads(model.entry)
    if group % server.cp or shared % server.cp:
        told = f"cp {server.cp} does not divide {group} ranks and {shared} query heads of a key"
        raise refuse(label, told, "cp 1")


def check_own_draft(deployment: Deployment, label: str) -> None:
    """Refuses draft layers that neither vLLM nor SGLang load."""
    if deployment.own_draft and "minimax-m2" in deployment.model.path.lower():
        raise refuse(label, "loads no draft layers of MiniMax-M2", "--draft MODEL")


def quantised(
    checkpoint: Checkpoint, server: Server, label: str, online: Mapping[tuple[str, str], str]
) -> str | None:
    """Returns what an engine makes of a checkpoint on loading it, None where that is as it is.

    Args: `online`, names of an engine by formats of weights and activations made of 16 bits.
    """
    own, asked = checkpoint.entry.precision, server.precision
    if (own.weights, own.activations, own.experts) == (
        asked.weights, asked.activations, asked.experts,
    ):  # fmt: skip
        return None
    if own.weights == "bf16" and own.experts is None and asked.experts is None:
        name = online.get((asked.weights, asked.activations))
        if name is not None:
            return name
    raise refuse(
        label,
        f"makes no {asked.weights}/{asked.activations} of {shorten(checkpoint.path)} ({own}) on "
        "loading; give the folder of a checkpoint in that format as MODEL",
    )


def cache_format(server: Server, label: str, known: Mapping[str, str]) -> str:
    kv = server.precision.kv
    if kv not in known:
        raise refuse(label, f"no KV cache in {kv}", ", ".join(known))
    return known[kv]


def check_narrow_cache(server: Server, model: Checkpoint, label: str) -> None:
    """Refuses a KV cache of 4 bits that no attention kernel of vLLM or SGLang reads."""
    if server.precision.kv != "nvfp4":
        return
    if latent(model.entry):
        raise refuse(label, "no KV cache in nvfp4 of latent attention", "fp8")
    if server.chip.sheet.identity["vendor"] != "NVIDIA":
        raise refuse(label, f"no KV cache in nvfp4 on {server.chip.name}", "fp8")


def check_hand_over(deployment: Deployment, label: str) -> None:
    """Refuses pools between which keys and values cannot be handed over as they are."""
    if len({server.precision.kv for server in deployment.servers}) > 1:
        told = " and ".join(server.precision.kv for server in deployment.servers)
        raise refuse(label, f"prefill and decode need one KV format, not {told}")
    if len({server.chip.sheet.identity["vendor"] for server in deployment.servers}) > 1:
        raise refuse(label, "prefill and decode need chips of one vendor")


def own_tokens(deployment: Deployment) -> int:
    """Returns prompt tokens that differ between requests."""
    return deployment.isl - deployment.shared


def per_group(server: Server) -> int:
    """Returns requests of an attention group."""
    return -(-server.sequences // server.attention_dp)


def step_tokens(server: Server, deployment: Deployment) -> int:
    """Returns tokens that a step of an attention group must hold: a chunk, or one token of each
    request with its drafted ones."""
    return max(server.chunk, per_group(server) * (1 + deployment.draft_tokens))


def devices(process: Process) -> dict[str, object]:
    if process.devices is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, process.devices))}


def entrance(found: Sequence[Process], port: int) -> list[Flag]:
    """Returns where requests are sent: to the first server, or what is in front on this host."""
    return [("--host", host(found[0].host)), ("--port", port)]


def random_prompts(deployment: Deployment) -> list[Flag]:
    """Returns flags of the benchmark that vLLM and TensorRT-LLM share: prompts are the prefix, the
    same for all, and random tokens after it."""
    return [
        ("--model", deployment.model.path),
        ("--dataset-name", "random"),
        ("--random-prefix-len", deployment.shared),
        ("--random-input-len", own_tokens(deployment)),
        ("--random-output-len", deployment.osl),
        ("--max-concurrency", deployment.concurrency),
        ("--num-prompts", ROUNDS * deployment.concurrency),
        ("--ignore-eos", None),
        ("--percentile-metrics", METRICS),
    ]
