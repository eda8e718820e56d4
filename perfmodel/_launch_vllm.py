"""Deployments as commands of vLLM."""

import json

from perfmodel._launch import (
    cache_format,
    check_hand_over,
    check_key_ranks,
    check_narrow_cache,
    check_own_draft,
    devices,
    entrance,
    per_group,
    quantised,
    random_prompts,
    step_tokens,
    whole_nodes,
)
from perfmodel._servers import (
    LOCAL,
    Deployment,
    Flag,
    Process,
    Server,
    command,
    host,
    processes,
    recurrent,
    refuse,
    scripts,
)

_ONLINE = {("fp8", "fp8"): "fp8_per_tensor"}
_PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"


def commands(deployment: Deployment, label: str) -> dict[str, str]:
    for server in deployment.servers:
        _checks(deployment, server, label)
    check_own_draft(deployment, label)
    if deployment.apart:
        check_hand_over(deployment, label)
    found = processes(deployment)
    texts = {}
    for process in found:
        flags = _flags(deployment, process, label)
        environment = devices(process)
        if deployment.apart:
            role = "producer" if process.server.role == "prefill" else "consumer"
            transfer = {"kv_connector": "NixlConnector", "kv_role": f"kv_{role}"}
            flags.append(("--kv-transfer-config", json.dumps(transfer)))
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host(process.host)
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = _port(process, side=True)
            if recurrent(deployment.model.entry):
                # The only layout of convolution states that the connector hands over.
                environment["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
        texts[process.file] = command(["vllm", "serve", deployment.model.path], flags, environment)
    front = 8192 if deployment.apart else 8000
    if deployment.apart:
        heads = [process for process in found if process.node == 0]
        flags = [("--port", front)]
        for role, flag in (("prefill", "prefiller"), ("decode", "decoder")):
            of_role = [process for process in heads if process.server.role == role]
            flags += [
                (f"--{flag}-hosts", tuple(host(process.host) for process in of_role)),
                (f"--{flag}-ports", tuple(_port(process) for process in of_role)),
            ]
        told = f"# In the sources of {label}, where the proxy of its documentation is.\n"
        texts["proxy.sh"] = told + command(["python", _PROXY], flags)
    where = [("--host", LOCAL), ("--port", front)] if deployment.apart else entrance(found, front)
    texts["bench.sh"] = command(
        ["vllm", "bench", "serve"],
        [
            ("--backend", "openai"),
            *where,
            ("--endpoint", "/v1/completions"),
            *random_prompts(deployment),
        ],
    )
    return scripts(found, texts)


def _checks(deployment: Deployment, server: Server, label: str) -> None:
    whole_nodes(server, label)
    check_key_ranks(server, deployment.model, label)
    check_narrow_cache(server, deployment.model, label)
    bodies = [block.body for block in deployment.model.entry.model.attention]
    newest = server.chip.sheet.identity["generation"].startswith("blackwell")
    if server.precision.kv == "nvfp4" and not newest:
        if any(float(getattr(body, "sinks", 0.0)) > 0.0 for body in bodies):
            told = f"no KV cache in nvfp4 of attention with sinks on {server.chip.name}"
            raise refuse(label, told, "fp8")
    if server.ep not in (1, server.tp):
        told = (
            f"spreads experts over all {server.tp} chips of a stage or none, not over {server.ep}"
        )
        raise refuse(label, told, f"ep {server.tp}")
    if server.attention_dp > 1 and not deployment.model.entry.model.is_mixture:
        told = "attention data parallelism keeps the layers after it whole in mixtures only"
        raise refuse(label, told, "attention_dp 1")
    if server.attention_dp > 1 and server.nodes > 1:
        if server.pp > 1 or server.attention_dp % server.nodes:
            told = (
                f"{server.attention_dp} attention groups do not fall on {server.nodes} whole nodes"
            )
            raise refuse(label, told)
    if deployment.apart and server.pp > 1:
        # Decoding servers read from the first stage alone.
        raise refuse(label, "hands over no caches of pipeline stages", "pp 1")


def _port(process: Process, side: bool = False) -> int:
    """Returns the port of a server, or the first of those that keys are asked for at."""
    if side:
        # One for each attention group.
        start = 5600 if process.server.role == "prefill" else 6600
        return start + process.index * process.server.attention_dp
    return {"serve": 8000, "prefill": 8100, "decode": 8200}[process.server.role] + process.index


def _flags(deployment: Deployment, process: Process, label: str) -> list[Flag]:
    server = process.server
    cache = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}
    made = quantised(deployment.model, server, label, _ONLINE)
    flags: list[Flag] = [("--tensor-parallel-size", server.tp // server.attention_dp)]
    if server.pp > 1:
        flags.append(("--pipeline-parallel-size", server.pp))
    if server.attention_dp > 1:
        flags.append(("--data-parallel-size", server.attention_dp))
    if server.ep > 1:
        flags.append(("--enable-expert-parallel", None))
    if server.cp > 1:
        flags.append(("--decode-context-parallel-size", server.cp))
    if server.nodes > 1:
        flags += _nodes(process)
    sequences = per_group(server)
    flags += [
        ("--port", _port(process)),
        ("--max-model-len", server.length),
        ("--max-num-seqs", sequences),
        ("--max-num-batched-tokens", step_tokens(server, deployment)),
        ("--gpu-memory-utilization", server.fraction),
        ("--kv-cache-dtype", cache_format(server, label, cache)),
    ]
    if made is not None:
        flags.append(("--quantization", made))
    if deployment.shared:
        flags.append(("--enable-prefix-caching", None))
    if deployment.draft_tokens:
        flags.append(("--speculative-config", json.dumps(_draft(deployment, server, label))))
    return flags


def _draft(deployment: Deployment, server: Server, label: str) -> dict[str, object]:
    guess = deployment.draft
    if guess is None:
        return {"method": "mtp", "num_speculative_tokens": deployment.draft_tokens}
    asked: dict[str, object] = {
        "method": "draft_model",
        "model": guess.path,
        "num_speculative_tokens": deployment.draft_tokens,
    }
    made = quantised(guess, server, label, _ONLINE)
    return asked | ({"quantization": made} if made else {})


def _nodes(process: Process) -> list[Flag]:
    server = process.server
    flags: list[Flag] = [("--headless", None)] if process.node > 0 else []
    if server.attention_dp == 1:
        return [
            ("--nnodes", server.nodes),
            ("--node-rank", process.node),
            ("--master-addr", host(process.head)),
            *flags,
        ]
    here_ = server.attention_dp // server.nodes
    if process.node > 0:
        # On the first node it would mean that this node balances its own groups only.
        flags.append(("--data-parallel-start-rank", here_ * process.node))
    return [
        ("--data-parallel-size-local", here_),
        ("--data-parallel-address", host(process.head)),
        ("--data-parallel-rpc-port", 13345),
        *flags,
    ]
