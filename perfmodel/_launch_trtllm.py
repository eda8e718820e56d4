"""Deployments as commands of TensorRT-LLM."""

import json

from perfmodel._launch import (
    cache_format,
    check_hand_over,
    devices,
    per_group,
    quantised,
    random_prompts,
    step_tokens,
)
from perfmodel._servers import (
    LOCAL,
    Deployment,
    Flag,
    Process,
    Server,
    command,
    here,
    hybrid,
    processes,
    refuse,
    scripts,
)

_BLOCK = 32
"""Tokens of a block of keys and values, as the engine makes it unless told [token]."""


def commands(deployment: Deployment, label: str) -> dict[str, str]:
    for server in deployment.servers:
        _checks(deployment, server, label)
    if deployment.apart:
        check_hand_over(deployment, label)
    found = processes(deployment)
    texts = {}
    for process in found:
        server = process.server
        options = process.file.removesuffix(".sh") + ".yaml"
        flags: list[Flag] = [
            ("--backend", "pytorch"),
            ("--host", LOCAL if process.host == LOCAL else "0.0.0.0"),
            ("--port", _port(process)),
            ("--tp_size", server.tp),
            ("--pp_size", server.pp),
            *([("--ep_size", server.ep)] if server.ep > 1 else []),
            ("--max_batch_size", per_group(server)),
            ("--max_num_tokens", step_tokens(server, deployment)),
            ("--max_seq_len", server.length),
            ("--config", options),
        ]
        start = command(["trtllm-serve", deployment.model.path], flags, devices(process))
        texts[process.file] = here(options, _options(deployment, server, label)) + "\n" + start
    if deployment.apart:
        lines = [f"hostname: {LOCAL}", "port: 8000", "backend: pytorch"]
        for role, key in (("prefill", "context_servers"), ("decode", "generation_servers")):
            of_role = [process for process in found if process.server.role == role]
            lines += [f"{key}:", f"  num_instances: {len(of_role)}", "  urls:"]
            for process in of_role:
                # The file holds the hosts themselves, so its text is not literal.
                name = LOCAL if process.host == LOCAL else f"${process.host}"
                lines.append(f'    - "{name}:{_port(process)}"')
        written = here("disaggregated.yaml", lines).replace("<<'END'", "<<END", 1)
        begin = command(["trtllm-serve", "disaggregated"], [("-c", "disaggregated.yaml")])
        texts["disaggregated.sh"] = f"{written}\n{begin}"
    texts["bench.sh"] = command(
        ["python", "-m", "tensorrt_llm.serve.scripts.benchmark_serving"],
        [
            ("--backend", "openai"), ("--host", LOCAL), ("--port", 8000),
            *random_prompts(deployment),
            # Else prompts are cut from a data set that has to be downloaded, and sent as text.
            ("--random-ids", None), ("--tokenize-on-client", None),
        ],
    )  # fmt: skip
    return scripts(found, texts)


def _port(process: Process) -> int:
    return {"serve": 8000, "prefill": 8100, "decode": 8200}[process.server.role] + process.index


def _checks(deployment: Deployment, server: Server, label: str) -> None:
    if deployment.apart and hybrid(deployment.model.entry):
        raise refuse(label, "hands over no caches that differ between layers")
    quantised(deployment.model, server, label, {})
    if server.nodes > 1:
        told = (
            f"a replica of {server.chips} chips spans nodes of {server.per_node}, which is for a "
        )
        raise refuse(label, told + "job scheduler to start", f"{server.per_node} chips")
    if server.cp > 1:
        raise refuse(label, f"no context parallelism of {server.cp} ranks", "cp 1")
    if server.attention_dp not in (1, server.tp):
        told = f"attends in one group or {server.tp} of the {server.tp} chips, not in "
        raise refuse(label, told + str(server.attention_dp), f"attention_dp {server.tp}")
    if deployment.draft is not None:
        quantised(deployment.draft, server, label, {})
    if deployment.draft_tokens and deployment.apart:
        raise refuse(label, "no drafts where prefill and decode are apart")
    if deployment.own_draft and "deepseek" not in deployment.model.path.lower():
        raise refuse(label, "drafts with the own layers of DeepSeek's checkpoints only")


def _options(deployment: Deployment, server: Server, label: str) -> list[str]:
    """Returns lines of the YAML file of what has no flag."""
    cache = cache_format(server, label, {"bf16": "auto", "fp8": "fp8"})
    lines = [
        f"enable_attention_dp: {str(server.attention_dp > 1).lower()}",
        "enable_chunked_prefill: true",
        "cuda_graph_config:",
        "  enable_padding: true",
        f"  max_batch_size: {per_group(server)}",
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
            f"  speculative_model: {json.dumps(deployment.draft.path)}",
        ]
    elif deployment.own_draft:
        lines += [
            "speculative_config:",
            "  decoding_type: MTP",
            f"  max_draft_len: {deployment.draft_tokens}",
            f"  num_nextn_predict_layers: {deployment.draft_tokens}",
        ]
    if deployment.apart:
        lines += [
            "cache_transceiver_config:",
            "  backend: UCX",
            # Of whole blocks of keys and values.
            f"  max_tokens_in_buffer: {-(-server.length // _BLOCK) * _BLOCK}",
        ]
    if deployment.draft is not None or server.role == "prefill":
        lines.append("disable_overlap_scheduler: true")
    return lines
