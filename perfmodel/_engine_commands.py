"""Deployments as commands of vLLM, SGLang and TensorRT-LLM.

Flags are those that the named version of an engine documents, kept in `perfmodel/engine_flags`. What
an engine cannot do is refused in one line. Benchmarks send requests of the lengths, the concurrency
and the shared prefix of the estimate.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from perfmodel._servers import (
    LOCAL,
    Checkpoint,
    Deployment,
    Flag,
    Process,
    Server,
    Shell,
    command,
    here,
    host,
    hybrid,
    kv_heads,
    processes,
    refuse,
    scripts,
    url,
)
from perfmodel.errors import InputError, nearest, shorten

ROUNDS = 10
"""Prompts of a benchmark for each of its concurrent requests: enough for a steady state between the
first prompts, which arrive at once, and the last, which run alone (assumed)."""

_METRICS = "ttft,tpot,itl,e2el"


def documented(engine: str) -> dict[str, Any]:
    """Returns the version of an engine, and the flags it documents with their sources.

    >>> documented("vllm")["engine"]["title"]
    'vLLM'
    """
    if engine not in ENGINES:
        raise InputError(f"--export: unknown engine {shorten(engine, 30)!r}{nearest(engine, ENGINES)}")
    folder = files("perfmodel").joinpath("engine_flags")
    return tomllib.loads(folder.joinpath(f"{engine}.toml").read_text(encoding="utf-8"))


def commands(engine: str, deployment: Deployment) -> dict[str, str]:
    """Returns the commands of a deployment by file name; InputError for what an engine cannot do."""
    known = documented(engine)["engine"]
    label = f"{known['title']} {known['version']}"
    for server in deployment.servers:
        vendor = server.chip.sheet.identity["vendor"]
        family = server.chip.sheet.identity["family"]
        if vendor not in known["vendors"] or family != "hbm_gpu":
            told = " and ".join(known["vendors"])
            raise refuse(label, f"does not run on {server.chip.name}, but on GPUs of {told}", "h100")
    return ENGINES[engine](deployment, label)


def _parted(server: Server, label: str) -> None:
    """Refuses servers that do not fill whole nodes."""
    if server.nodes > 1 and server.chips % server.per_node:
        raise refuse(
            label,
            f"{server.chips} chips of a replica do not fill whole nodes of {server.per_node}",
            str(server.nodes * server.per_node),
        )


def _spread_keys(server: Server, model: Checkpoint, label: str) -> None:
    """Refuses keys spread over more ranks than hold copies of them."""
    copies = max(server.tp // server.attention_dp // kv_heads(model.entry), 1)
    if server.cp > copies:
        raise refuse(label, f"cp {server.cp} exceeds the {copies} copies of each key head", str(copies))


def _quantised(
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


def _cache_format(server: Server, label: str, known: Mapping[str, str]) -> str:
    kv = server.precision.kv
    if kv not in known:
        raise refuse(label, f"no KV cache in {kv}", ", ".join(known))
    return known[kv]


def _same_cache(deployment: Deployment, label: str) -> None:
    """Refuses pools between which keys and values cannot be handed over as they are."""
    if len({server.precision.kv for server in deployment.servers}) > 1:
        told = " and ".join(server.precision.kv for server in deployment.servers)
        raise refuse(label, f"prefill and decode need one KV format, not {told}")
    if len({server.chip.sheet.identity["vendor"] for server in deployment.servers}) > 1:
        raise refuse(label, "prefill and decode need chips of one vendor")


def _shared(deployment: Deployment) -> int:
    """Returns prompt tokens that differ between requests."""
    return deployment.isl - deployment.shared


def _rank(server: Server) -> int:
    """Returns requests of an attention group."""
    return -(-server.sequences // server.attention_dp)


def _devices(process: Process) -> dict[str, object]:
    if process.devices is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, process.devices))}


def _entry(found: Sequence[Process], port: int) -> list[Flag]:
    """Returns where requests are sent: to the first server, or what is in front on this host."""
    return [("--host", host(found[0].host)), ("--port", port)]


# ---- vLLM ----

_VLLM_PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"


def _vllm(deployment: Deployment, label: str) -> dict[str, str]:
    for server in deployment.servers:
        _vllm_checks(deployment, server, label)
    if deployment.apart:
        _same_cache(deployment, label)
    found = processes(deployment)
    texts = {}
    for process in found:
        flags = _vllm_flags(deployment, process, label)
        environment = _devices(process)
        if deployment.apart:
            role = "producer" if process.server.role == "prefill" else "consumer"
            transfer = {"kv_connector": "NixlConnector", "kv_role": f"kv_{role}"}
            flags.append(("--kv-transfer-config", json.dumps(transfer)))
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host(process.host)
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = _vllm_port(process, side=True)
        texts[process.file] = command(["vllm", "serve", deployment.model.path], flags, environment)
    front = 8192 if deployment.apart else 8000
    if deployment.apart:
        heads = [process for process in found if process.node == 0]
        flags = [("--port", front)]
        for role, flag in (("prefill", "prefiller"), ("decode", "decoder")):
            of_role = [process for process in heads if process.server.role == role]
            flags += [
                (f"--{flag}-hosts", tuple(host(process.host) for process in of_role)),
                (f"--{flag}-ports", tuple(_vllm_port(process) for process in of_role)),
            ]
        told = f"# In the sources of {label}, where the proxy of its documentation is.\n"
        texts["proxy.sh"] = told + command(["python", _VLLM_PROXY], flags)
    where = [("--host", LOCAL), ("--port", front)] if deployment.apart else _entry(found, front)
    texts["bench.sh"] = command(
        ["vllm", "bench", "serve"],
        [("--backend", "openai"), *where, ("--endpoint", "/v1/completions"), *_random(deployment)],
    )
    return scripts(found, texts)


def _random(deployment: Deployment) -> list[Flag]:
    """Returns flags of the benchmark that vLLM and TensorRT-LLM share: prompts are the prefix, the
    same for all, and random tokens after it."""
    return [
        ("--model", deployment.model.path),
        ("--dataset-name", "random"),
        ("--random-prefix-len", deployment.shared),
        ("--random-input-len", _shared(deployment)),
        ("--random-output-len", deployment.osl),
        ("--max-concurrency", deployment.concurrency),
        ("--num-prompts", ROUNDS * deployment.concurrency),
        ("--ignore-eos", None),
        ("--percentile-metrics", _METRICS),
    ]


def _vllm_checks(deployment: Deployment, server: Server, label: str) -> None:
    _parted(server, label)
    _spread_keys(server, deployment.model, label)
    if server.ep not in (1, server.tp):
        told = f"spreads experts over all {server.tp} chips of a stage or none, not over {server.ep}"
        raise refuse(label, told, f"ep {server.tp}")
    if server.attention_dp > 1 and not deployment.model.entry.model.is_mixture:
        told = "attention data parallelism keeps the layers after it whole in mixtures only"
        raise refuse(label, told, "attention_dp 1")
    if server.attention_dp > 1 and server.nodes > 1:
        if server.pp > 1 or server.attention_dp % server.nodes:
            told = f"{server.attention_dp} attention groups do not fall on {server.nodes} whole nodes"
            raise refuse(label, told)
    if deployment.apart and server.pp > 1 and hybrid(deployment.model.entry):
        told = "hands over no caches of several kinds between pipeline stages"
        raise refuse(label, told, "pp 1")


def _vllm_port(process: Process, side: bool = False) -> int:
    """Returns the port of a server, or the first of those that keys are asked for at."""
    if side:
        # One for each attention group.
        start = 5600 if process.server.role == "prefill" else 6600
        return start + process.index * process.server.attention_dp
    return {"serve": 8000, "prefill": 8100, "decode": 8200}[process.server.role] + process.index


def _vllm_flags(deployment: Deployment, process: Process, label: str) -> list[Flag]:
    server = process.server
    online = {("fp8", "fp8"): "fp8_per_tensor"}
    cache = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}
    made = _quantised(deployment.model, server, label, online)
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
        flags += _vllm_nodes(process)
    sequences = _rank(server)
    flags += [
        ("--port", _vllm_port(process)),
        ("--max-model-len", server.length),
        ("--max-num-seqs", sequences),
        ("--max-num-batched-tokens", max(server.chunk, sequences)),
        ("--gpu-memory-utilization", server.fraction),
        ("--kv-cache-dtype", _cache_format(server, label, cache)),
    ]
    if made is not None:
        flags.append(("--quantization", made))
    if deployment.shared:
        flags.append(("--enable-prefix-caching", None))
    if deployment.draft is not None:
        guess: dict[str, object] = {
            "method": "draft_model",
            "model": deployment.draft.path,
            "num_speculative_tokens": deployment.draft_tokens,
        }
        made = _quantised(deployment.draft, server, label, online)
        flags.append(
            ("--speculative-config", json.dumps(guess | ({"quantization": made} if made else {})))
        )
    return flags


def _vllm_nodes(process: Process) -> list[Flag]:
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
    return [
        ("--data-parallel-size-local", here_),
        ("--data-parallel-start-rank", here_ * process.node),
        ("--data-parallel-address", host(process.head)),
        ("--data-parallel-rpc-port", 13345),
        *flags,
    ]


# ---- SGLang ----


def _sglang(deployment: Deployment, label: str) -> dict[str, str]:
    for server in deployment.servers:
        _parted(server, label)
        _spread_keys(server, deployment.model, label)
        if deployment.draft is not None and server.attention_dp > 1:
            raise refuse(label, "a draft model and attention data parallelism exclude each other")
    if deployment.apart:
        _same_cache(deployment, label)
        if deployment.servers[0].chip.sheet.identity["vendor"] != "NVIDIA":
            raise refuse(label, "prefill and decode apart are exported for NVIDIA's GPUs only")
    found = processes(deployment)
    texts = {
        process.file: command(
            ["python", "-m", "sglang.launch_server"],
            _sglang_flags(deployment, process, label),
            _devices(process),
        )
        for process in found
    }
    front = 8000 if deployment.apart else 30000
    if deployment.apart:
        heads = [process for process in found if process.node == 0]
        flags: list[Flag] = [("--pd-disaggregation", None)]
        for process in heads:
            at = url(process.host, _sglang_port(process))
            if process.server.role == "prefill":
                flags.append(("--prefill", (at, _sglang_bootstrap(process))))
            else:
                flags.append(("--decode", at))
        flags += [("--host", "0.0.0.0"), ("--port", front)]
        texts["router.sh"] = command(["python", "-m", "sglang_router.launch_router"], flags)
    where = [("--host", LOCAL), ("--port", front)] if deployment.apart else _entry(found, front)
    prompts = ROUNDS * deployment.concurrency
    if deployment.shared:
        # One group: all prompts begin alike.
        data: list[Flag] = [
            ("--dataset-name", "generated-shared-prefix"),
            ("--gsp-num-groups", 1),
            ("--gsp-prompts-per-group", prompts),
            ("--gsp-system-prompt-len", deployment.shared),
            ("--gsp-question-len", _shared(deployment)),
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
            ("--max-concurrency", deployment.concurrency), ("--num-prompts", prompts),
        ],
    )  # fmt: skip
    return scripts(found, texts)


def _sglang_port(process: Process) -> int:
    return {"serve": 30000, "prefill": 30000, "decode": 31000}[process.server.role] + process.index


def _sglang_bootstrap(process: Process) -> int:
    return 8998 + process.index


def _sglang_flags(deployment: Deployment, process: Process, label: str) -> list[Flag]:
    server = process.server
    online = {("fp8", "fp8"): "fp8"}
    cache = {"bf16": "bf16", "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
    made = _quantised(deployment.model, server, label, online)
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
        ("--port", _sglang_port(process)),
        ("--context-length", server.length),
        # Of all attention groups, who share both.
        ("--max-running-requests", _rank(server) * server.attention_dp),
        ("--chunked-prefill-size", server.chunk * server.attention_dp),
        ("--mem-fraction-static", server.static),
        ("--kv-cache-dtype", _cache_format(server, label, cache)),
    ]
    if made is not None:
        flags.append(("--quantization", made))
    if deployment.draft is not None:
        flags += [
            ("--speculative-algorithm", "STANDALONE"),
            ("--speculative-draft-model-path", deployment.draft.path),
            ("--speculative-num-steps", deployment.draft_tokens),
            ("--speculative-eagle-topk", 1),
            # The drafted ones and the one before them.
            ("--speculative-num-draft-tokens", deployment.draft_tokens + 1),
        ]
        made = _quantised(deployment.draft, server, label, online)
        if made is not None:
            flags.append(("--speculative-draft-model-quantization", made))
    if deployment.apart:
        flags += [
            ("--disaggregation-mode", server.role),
            ("--disaggregation-transfer-backend", "nixl"),
        ]
        if server.role == "prefill":
            flags.append(("--disaggregation-bootstrap-port", _sglang_bootstrap(process)))
    return flags


# ---- TensorRT-LLM ----


def _trtllm(deployment: Deployment, label: str) -> dict[str, str]:
    for server in deployment.servers:
        _trtllm_checks(deployment, server, label)
    if deployment.apart:
        _same_cache(deployment, label)
    found = processes(deployment)
    texts = {}
    for process in found:
        server = process.server
        options = process.file.removesuffix(".sh") + ".yaml"
        flags: list[Flag] = [
            ("--backend", "pytorch"),
            ("--host", LOCAL if process.host == LOCAL else "0.0.0.0"),
            ("--port", _trtllm_port(process)),
            ("--tp_size", server.tp),
            ("--pp_size", server.pp),
            *([("--ep_size", server.ep)] if server.ep > 1 else []),
            ("--max_batch_size", _rank(server)),
            ("--max_num_tokens", max(server.chunk, _rank(server))),
            ("--max_seq_len", server.length),
            ("--extra_llm_api_options", options),
        ]
        start = command(["trtllm-serve", deployment.model.path], flags, _devices(process))
        texts[process.file] = here(options, _trtllm_options(deployment, server, label)) + "\n" + start
    if deployment.apart:
        lines = ["hostname: localhost", "port: 8000", "backend: pytorch"]
        for role, key in (("prefill", "context_servers"), ("decode", "generation_servers")):
            of_role = [process for process in found if process.server.role == role]
            lines += [f"{key}:", f"  num_instances: {len(of_role)}", "  urls:"]
            for process in of_role:
                # The file holds the hosts themselves, so its text is not literal.
                name = LOCAL if process.host == LOCAL else f"${process.host}"
                lines.append(f'    - "{name}:{_trtllm_port(process)}"')
        written = here("disaggregated.yaml", lines).replace("<<'END'", "<<END", 1)
        begin = command(["trtllm-serve", "disaggregated"], [("-c", "disaggregated.yaml")])
        texts["disaggregated.sh"] = f"{written}\n{begin}"
    texts["bench.sh"] = command(
        ["python", "-m", "tensorrt_llm.serve.scripts.benchmark_serving"],
        [("--backend", "openai"), ("--host", LOCAL), ("--port", 8000), *_random(deployment)],
    )
    return scripts(found, texts)


def _trtllm_port(process: Process) -> int:
    return {"serve": 8000, "prefill": 8100, "decode": 8200}[process.server.role] + process.index


def _trtllm_checks(deployment: Deployment, server: Server, label: str) -> None:
    _quantised(deployment.model, server, label, {})
    if server.nodes > 1:
        told = f"a replica of {server.chips} chips spans nodes of {server.per_node}, which is for a "
        raise refuse(label, told + "job scheduler to start", f"{server.per_node} chips")
    if server.cp > 1:
        raise refuse(label, f"no context parallelism of {server.cp} ranks", "cp 1")
    if server.attention_dp not in (1, server.tp):
        told = f"attends in one group or {server.tp} of the {server.tp} chips, not in "
        raise refuse(label, told + str(server.attention_dp), f"attention_dp {server.tp}")
    if deployment.draft is not None:
        _quantised(deployment.draft, server, label, {})
        if deployment.apart:
            raise refuse(label, "no draft model where prefill and decode are apart")


def _trtllm_options(deployment: Deployment, server: Server, label: str) -> list[str]:
    """Returns lines of the YAML file of what has no flag."""
    cache = _cache_format(server, label, {"bf16": "auto", "fp8": "fp8"})
    lines = [
        f"enable_attention_dp: {str(server.attention_dp > 1).lower()}",
        "enable_chunked_prefill: true",
        "cuda_graph_config:",
        "  enable_padding: true",
        f"  max_batch_size: {_rank(server)}",
        "kv_cache_config:",
        f"  dtype: {cache}",
        f"  free_gpu_memory_fraction: {server.pool}",
        f"  enable_block_reuse: {str(deployment.shared > 0).lower()}",
    ]
    if deployment.draft is not None:
        lines += [
            "speculative_config:",
            "  decoding_type: DraftTarget",
            f"  max_draft_len: {deployment.draft_tokens}",
            f"  speculative_model_dir: {json.dumps(deployment.draft.path)}",
        ]
    if deployment.apart:
        lines += [
            "cache_transceiver_config:",
            "  backend: UCX",
            f"  max_tokens_in_buffer: {server.length}",
        ]
    if deployment.draft is not None or server.role == "prefill":
        lines.append("disable_overlap_scheduler: true")
    return lines


ENGINES: Mapping[str, Callable[[Deployment, str], dict[str, str]]] = {
    "vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm,
}  # fmt: skip
"""Engines by name."""
