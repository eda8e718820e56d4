"""Deployments as commands of SGLang."""

from perfmodel._launch import (
    ROUNDS,
    cache_format,
    check_hand_over,
    check_key_ranks,
    check_narrow_cache,
    check_own_draft,
    devices,
    entrance,
    own_tokens,
    per_group,
    quantised,
    whole_nodes,
)
from perfmodel._servers import (
    LOCAL,
    Deployment,
    Flag,
    Process,
    Server,
    Shell,
    command,
    processes,
    refuse,
    scripts,
    url,
)
from perfmodel.models.compressed import CompressedAttention

PAGE = 64
"""Tokens of a page of keys and values, of the attention kernels that have the largest [token]."""


def commands(deployment: Deployment, label: str) -> dict[str, str]:
    for server in deployment.servers:
        whole_nodes(server, label)
        check_key_ranks(server, deployment.model, label)
        check_narrow_cache(server, deployment.model, label)
        _check_cache(server, deployment, label)
        if deployment.draft is not None and server.attention_dp > 1:
            raise refuse(label, "a draft model and attention data parallelism exclude each other")
        if deployment.draft_tokens and server.pp > 1:
            raise refuse(label, "drafts and pipeline stages exclude each other", "pp 1")
    check_own_draft(deployment, label)
    if deployment.apart:
        check_hand_over(deployment, label)
        if deployment.servers[0].chip.sheet.identity["vendor"] != "NVIDIA":
            raise refuse(label, "prefill and decode apart are exported for NVIDIA's GPUs only")
    found = processes(deployment)
    texts = {
        process.file: command(
            ["python", "-m", "sglang.launch_server"],
            _flags(deployment, process, label),
            devices(process),
        )
        for process in found
    }
    front = 8000 if deployment.apart else 30000
    if deployment.apart:
        heads = [process for process in found if process.node == 0]
        flags: list[Flag] = [("--pd-disaggregation", None)]
        for process in heads:
            at = url(process.host, _port(process))
            if process.server.role == "prefill":
                flags.append(("--prefill", (at, _bootstrap(process))))
            else:
                flags.append(("--decode", at))
        flags += [("--host", "0.0.0.0"), ("--port", front)]
        texts["router.sh"] = command(["python", "-m", "sglang_router.launch_router"], flags)
    where = [("--host", LOCAL), ("--port", front)] if deployment.apart else entrance(found, front)
    prompts = ROUNDS * deployment.concurrency
    if deployment.shared:
        # One group: all prompts begin alike.
        data: list[Flag] = [
            ("--dataset-name", "generated-shared-prefix"),
            ("--gsp-num-groups", 1),
            ("--gsp-prompts-per-group", prompts),
            ("--gsp-system-prompt-len", deployment.shared),
            ("--gsp-question-len", own_tokens(deployment)),
            ("--gsp-output-len", deployment.osl),
        ]
    else:
        # A range ratio of 1 makes all lengths equal.
        data = [
            ("--dataset-name", "random-ids"),
            ("--random-input-len", deployment.isl),
            ("--random-output-len", deployment.osl),
            ("--random-range-ratio", 1.0),
        ]
    texts["bench.sh"] = command(
        ["python", "-m", "sglang.benchmark.serving"],
        [
            ("--backend", "sglang"), *where, ("--model", deployment.model.path), *data,
            # Token ids are sent, so that prompts are as long as asked for.
            ("--tokenize-prompt", None),
            ("--max-concurrency", deployment.concurrency), ("--num-prompts", prompts),
        ],
    )  # fmt: skip
    return scripts(found, texts)


def _check_cache(server: Server, deployment: Deployment, label: str) -> None:
    """Refuses KV caches that SGLang keeps on some chips, or for some networks, only."""
    kv = server.precision.kv
    compressed = any(
        isinstance(block.body, CompressedAttention)
        for block in deployment.model.entry.model.attention
    )
    if compressed and kv != "fp8":
        raise refuse(label, f"no KV cache in {kv} of compressed attention", "fp8")
    if kv != "nvfp4":
        return
    if not server.chip.sheet.identity["generation"].startswith("blackwell"):
        raise refuse(label, f"no KV cache in nvfp4 on {server.chip.name}", "fp8")
    if deployment.draft is not None or deployment.apart:
        told = "beside a draft model" if deployment.draft is not None else "that is handed over"
        raise refuse(label, f"no KV cache in nvfp4 {told}", "fp8")


def _port(process: Process) -> int:
    return {"serve": 30000, "prefill": 30000, "decode": 31000}[process.server.role] + process.index


def _bootstrap(process: Process) -> int:
    return 8998 + process.index


def _chunk(server: Server) -> int:
    """Returns the prompt tokens of a step in whole pages, of which a step must be made."""
    return max(server.chunk // PAGE * PAGE, PAGE)


def _flags(deployment: Deployment, process: Process, label: str) -> list[Flag]:
    server = process.server
    online = {("fp8", "fp8"): "fp8"}
    cache = {"bf16": "bf16", "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
    made = quantised(deployment.model, server, label, online)
    flags: list[Flag] = [("--model-path", deployment.model.path), ("--tp-size", server.tp)]
    degrees = (
        ("--pp-size", server.pp), ("--ep-size", server.ep), ("--attn-dp-size", server.attention_dp),
        ("--dcp-size", server.cp),
    )  # fmt: skip
    flags += [(flag, degree) for flag, degree in degrees if degree > 1]
    if server.nodes > 1:
        port = 20000 + process.index
        at = Shell(f'"${process.head}:{port}"')
        flags += [
            ("--nnodes", server.nodes), ("--node-rank", process.node), ("--dist-init-addr", at),
        ]  # fmt: skip
    if process.host != LOCAL:
        flags.append(("--host", "0.0.0.0"))
    flags += [
        ("--port", _port(process)),
        ("--context-length", server.length),
        # Of all attention groups, who share both.
        ("--max-running-requests", per_group(server) * server.attention_dp),
        ("--chunked-prefill-size", _chunk(server) * server.attention_dp),
        ("--mem-fraction-static", server.static),
        ("--kv-cache-dtype", cache_format(server, label, cache)),
    ]
    if made is not None:
        flags.append(("--quantization", made))
    if deployment.draft_tokens:
        # The network's own draft layers are those of the checkpoint.
        flags += [
            ("--speculative-algorithm", "EAGLE" if deployment.own_draft else "STANDALONE"),
            ("--speculative-num-steps", deployment.draft_tokens),
            ("--speculative-eagle-topk", 1),
            # The drafted ones and the one before them.
            ("--speculative-num-draft-tokens", deployment.draft_tokens + 1),
        ]
    if deployment.draft is not None:
        flags.append(("--speculative-draft-model-path", deployment.draft.path))
        made = quantised(deployment.draft, server, label, online)
        if made is not None:
            flags.append(("--speculative-draft-model-quantization", made))
    if deployment.apart:
        flags += [
            ("--disaggregation-mode", server.role),
            ("--disaggregation-transfer-backend", "nixl"),
        ]
        if server.role == "prefill":
            flags.append(("--disaggregation-bootstrap-port", _bootstrap(process)))
    return flags
