"""Exports: documented flags, lengths that fit the pool, lines that paste, refusals in a line."""

import dataclasses
import json
import re
import shlex
import subprocess

import pytest
import xarray as xr

from perfmodel import _export_command, chips, cli, export, systems
from perfmodel.errors import Infeasible, InputError

LLAMA, MIXTURE = "llama-3.3-70b", "qwen3-235b-a22b-fp8"
ENGINES = tuple(export.ENGINES)


def of_pool(model=LLAMA, chip="h100", engine="neutral", formats=None, isl=4000, osl=1000, **other):
    """Returns the deployment of an estimate whose numbers are given here."""
    read = {
        "tp": 8, "pp": 1, "ep": 1, "attention_dp": 1, "cp": 1, "regions": 1, "offload": 0.0,
        "batch": 32, "chunk": 2048, "replicas": 1, "running": 32.0, "e2e_s": 20.0,
        "weight_bytes": 17.6e9, "activation_bytes": 0.1e9, "memory_margin": 0.66,
    }  # fmt: skip
    hit = other.pop("prefix_hit", 0.0)
    about = {"isl": isl, "osl": osl, "prefix_hit": hit}
    found = xr.Dataset({**read, "binding": "links", **other}, attrs=about)
    return export.of_pool(model, chip, found, engine=engine, **(formats or {}))


def of_system(pools, batch=32, running=32.0, margin=0.3, draft=None, model=LLAMA, **options):
    """Returns the deployment of a system of named pools, with its numbers given here."""
    tokens = options.pop("tokens", 4.0)
    if draft is not None:
        options |= {"draft": draft, "spec": systems.acceptance(tokens, 0.8, None)}
    where, named = systems.table(pools, None)
    made = systems.ask(model, named, where, batch=batch, isl=4000, osl=1000, **options)
    names = list(made.pools)
    found = xr.Dataset(
        {
            "e2e_s": 20.0, "running": running, "binding": "links",
            "pool_memory_margin": ("pool", [margin] * len(names)),
            "pool_weight_bytes": ("pool", [20e9] * len(names)),
        },
        {"pool": names},
        {"isl": 4000, "osl": 1000, "prefix_hit": options.get("prefix_hit", 0.0), "batch": batch},
    )  # fmt: skip
    return export.of_system(made, found, draft, tokens if draft else 0.0)


def words(text):
    """Returns the commands of a script as words, as a shell would read them."""
    text = re.sub(r"^cat > .*?^END$", "", text, flags=re.S | re.M)
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [each for each in found if each and not re.fullmatch(r"[A-Z_0-9]+=\S*", " ".join(each))]


def flags(text, program):
    """Returns the flags of the command of a program, with their values."""
    (found,) = [each for each in words(text) if program in " ".join(each)]
    read, name = {}, ""
    for word in found:
        if word.startswith("-") and word != "-m":
            name = word
            read.setdefault(name, [])
        elif name:
            read[name].append(word)
    return {key: " ".join(values) for key, values in read.items()}


def server(engine, deployment, file="serve.sh"):
    program = {"vllm": "vllm serve", "sglang": "launch_server", "trtllm": "trtllm-serve"}[engine]
    return flags(export.export(engine, deployment).scripts[file], program)


def bench(engine, deployment):
    return flags(export.export(engine, deployment).scripts["bench.sh"], "--dataset-name")


def many(engine):
    """Returns deployments that between them use every flag."""
    own = {"weights": "bf16"} if engine == "trtllm" else {"weights": "fp8"}
    pair = f"weights={own['weights']}"
    found = [
        of_pool(formats=own, prefix_hit=0.256, replicas=3),
        of_pool(MIXTURE, "h200", ep=8, attention_dp=8),
        of_pool(MIXTURE, "h200", tp=4, pp=2),
        of_system({"prefill": f"h100:tp=4,replicas=2,{pair}", "decode": f"h200:tp=8,{pair}"}),
        of_system({"prefill": f"h100:tp=2,{pair}", "decode": f"h100:tp=4,{pair}"}),
        of_system({"decode": f"h100:tp=8,{pair}"}, draft="llama-3.1-8b"),
        of_system({"decode": "h200:tp=8"}, draft="mtp", model="deepseek-v3", tokens=1.0),
    ]
    if engine != "trtllm":
        found += [
            of_pool(MIXTURE, "h200", tp=8, cp=2),
            of_pool("deepseek-v3", "h200", tp=16),
            of_pool("deepseek-v3", "h200", tp=16, ep=16, attention_dp=16),
            of_system(
                {"prefill": f"h100:tp=4,{pair}", "decode": f"h100:tp=4,{pair}"},
                draft="llama-3.1-8b",
            ),
            of_system({"prefill": "h100:tp=4", "decode": "h100:tp=4"}, model="qwen3-next-80b-a3b"),
        ]
    return found


# ---- What is written is documented, and a shell reads it ----


@pytest.mark.parametrize("engine", ENGINES)
def test_every_flag_is_documented_and_every_documented_flag_is_used(engine):
    known = export.documented(engine)
    used = {program: set() for program in known["commands"]}
    names, keys = set(), set()
    for deployment in many(engine):
        for text in export.export(engine, deployment).scripts.values():
            keys |= set(re.findall(r"^ *(\w+):(?= |$)", text, flags=re.M))
            for each in words(text):
                while re.fullmatch(r"[A-Z_]+=.*", each[0]):
                    names.add(each.pop(0).split("=")[0])
                line = " ".join(each)
                program = max((p for p in used if line.startswith(p)), key=len)
                used[program] |= {w for w in each if re.fullmatch("--?[a-z].*", w) and w != "-m"}
    assert used == {p: set(known["commands"][p]["flags"]) for p in used}
    assert names == set(known["environment"]["names"])
    assert keys == set(known.get("keys", {}).get("names", []))
    sources = [entry["source"] for entry in known["commands"].values()]
    assert all(source.startswith("https://") for source in sources)


@pytest.mark.parametrize("engine", ENGINES)
def test_scripts_are_read_by_a_shell(engine, tmp_path):
    for deployment in many(engine):
        made = export.export(engine, deployment)
        paths = made.write(tmp_path, "perfmodel estimate 'a b'\n --export")
        for path in paths.values():
            assert path.stat().st_mode & 0o100
            assert path.read_text().startswith("#!/usr/bin/env bash\n# perfmodel ")
            subprocess.run(["bash", "-n", path], check=True)
        subprocess.run(["bash", "-n", "-c", made.text("made by")], check=True)


def test_words_arrive_as_they_were(tmp_path):
    folder = tmp_path / "it's a $HOME; model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 8192,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    text = export.export("vllm", of_pool(str(folder), tp=1)).scripts["serve.sh"]
    told = subprocess.run(
        ["bash", "-c", 'vllm() { printf "%s\\n" "$2"; }\n' + text],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert told.stdout == f"{folder}\n"


def test_hosts_are_variables_that_a_shell_fills_in(tmp_path):
    made = export.export("trtllm", of_system({"prefill": "h100:tp=8", "decode": "h200:tp=8"}))
    start = "trtllm-serve() { cat disaggregated.yaml; }\nDECODE_0=10.0.0.7\n"
    told = subprocess.run(
        ["bash", "-c", start + made.scripts["disaggregated.sh"]],
        check=True, capture_output=True, text=True, cwd=tmp_path,
    ).stdout  # fmt: skip
    assert '    - "10.0.0.7:8200"' in told and '    - "prefill-0:8100"' in told


# ---- Lengths, concurrency and memory are those of the estimate ----

LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length", "trtllm": "--max_seq_len"}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pool_that_holds_little_lowers_the_length(engine):
    # 327,680 B of keys and values a token: 0.02 % of 80 GB are 50 tokens.
    room = float(chips.load_chip("h100").fields["memory_capacity"].value)
    tight = of_pool(memory_margin=50.5 * 327_680 / room)
    assert server(engine, of_pool())[LENGTH[engine]] == "5256"
    assert server(engine, tight)[LENGTH[engine]] == "5050"
    assert server(engine, of_pool(memory_margin=0.0))[LENGTH[engine]] == "5000"
    with pytest.raises(Infeasible, match="does not hold one request of 5,000 tokens"):
        of_pool(memory_margin=-1e-6)
    # No longer than the network's context of 131,072 either.
    longest = of_pool(isl=130_000, osl=1000)
    assert server(engine, longest)[LENGTH[engine]] == "131072"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_benchmark_has_the_share_of_prefix_hits(engine):
    asked = bench(engine, of_pool(prefix_hit=1024 / 4000))
    names = {"sglang": ("--gsp-system-prompt-len", "--gsp-question-len", "--gsp-output-len")}
    usual = ("--random-prefix-len", "--random-input-len", "--random-output-len")
    prefix, own, out = names.get(engine, usual)
    assert (asked[prefix], asked[own], asked[out]) == ("1024", "2976", "1000")
    assert (asked["--max-concurrency"], asked["--num-prompts"]) == ("32", "320")
    plain = bench(engine, of_pool())
    assert plain["--random-input-len"] == "4000" and plain.get(prefix, "0") == "0"


def test_limits_of_an_attention_group_and_of_all():
    wide = of_pool(MIXTURE, "h200", ep=8, attention_dp=8, running=250.0, chunk=1024)
    vllm = server("vllm", wide)
    assert vllm["--max-num-seqs"] == "32" and vllm["--max-num-batched-tokens"] == "1024"
    assert vllm["--tensor-parallel-size"] == "1" and vllm["--data-parallel-size"] == "8"
    sglang = server("sglang", wide)
    assert sglang["--max-running-requests"] == "256" and sglang["--chunked-prefill-size"] == "8192"
    assert sglang["--tp-size"] == "8" and sglang["--attn-dp-size"] == "8"
    trtllm = server("trtllm", wide)
    assert trtllm["--max_batch_size"] == "32" and trtllm["--tp_size"] == "8"


def test_engines_take_the_memory_of_the_estimate():
    assert server("vllm", of_pool(engine="vllm"))["--gpu-memory-utilization"] == "0.9"
    room = float(chips.load_chip("h100").fields["memory_capacity"].value)
    pool = 0.9 * room - 17.6e9 - 0.1e9 - 2e9
    static = float(server("sglang", of_pool())["--mem-fraction-static"])
    assert static * room == pytest.approx(pool + 17.6e9, rel=2e-3)
    text = export.export("trtllm", of_pool()).scripts["serve.sh"]
    share = float(re.search(r"free_gpu_memory_fraction: (\S+)", text)[1])
    assert share * (room - 17.6e9 - 0.1e9 - 2e9) == pytest.approx(pool, rel=2e-3)


def test_formats_are_the_checkpoints_or_made_on_loading():
    assert "--quantization" not in server("vllm", of_pool())
    assert "--quantization" not in server("vllm", of_pool(MIXTURE, "h200"))
    made = server("vllm", of_pool(formats={"weights": "fp8"}))
    assert (made["--quantization"], made["--kv-cache-dtype"]) == ("fp8_per_tensor", "fp8")
    made = server("sglang", of_pool(formats={"kv": "fp8"}))
    assert made["--kv-cache-dtype"] == "fp8_e4m3" and "--quantization" not in made


# ---- Prefill and decode apart, drafts, nodes ----


def test_prefill_and_decode_on_one_node_and_on_several():
    one = of_system({"prefill": "h100:tp=2", "decode": "h100:tp=4"})
    scripts = export.export("vllm", one).scripts
    assert list(scripts) == ["prefill-0.sh", "decode-0.sh", "proxy.sh", "bench.sh"]
    assert "CUDA_VISIBLE_DEVICES=0,1 " in scripts["prefill-0.sh"]
    assert "CUDA_VISIBLE_DEVICES=2,3,4,5 " in scripts["decode-0.sh"]
    assert "PREFILL" not in "".join(scripts.values())
    several = of_system({"prefill": "h100:tp=4,replicas=3", "decode": "h200:tp=8,replicas=2"})
    scripts = export.export("sglang", several).scripts
    router = flags(scripts["router.sh"], "launch_router")
    assert router["--prefill"] == (
        "http://$PREFILL_0:30000 8998 http://$PREFILL_0:30001 8999 http://$PREFILL_1:30002 9000"
    )
    assert router["--decode"] == "http://$DECODE_0:31000 http://$DECODE_1:31001"
    # 32 requests at each of the servers that decode.
    assert bench("sglang", several)["--max-concurrency"] == "64"
    sides = [flags(scripts[f"{role}-0.sh"], "launch_server") for role in ("prefill", "decode")]
    assert [side["--disaggregation-mode"] for side in sides] == ["prefill", "decode"]
    transfer = server("vllm", several, "decode-1.sh")["--kv-transfer-config"]
    assert json.loads(transfer)["kv_role"] == "kv_consumer"


def test_ports_of_servers_on_a_node_differ():
    found = of_system({"prefill": "h100:tp=1,replicas=2", "decode": "h100:tp=2,replicas=3"},
                      model="llama-3.1-8b")  # fmt: skip
    scripts = export.export("vllm", found).scripts
    servers = [text for name, text in scripts.items() if name[:3] in ("pre", "dec")]
    for pattern in (r"--port (\d+)", r"SIDE_CHANNEL_PORT=(\d+)", r"DEVICES=(\S+)"):
        assert len({re.search(pattern, text)[1] for text in servers}) == 5


def test_a_draft_on_the_same_pool():
    found = of_system({"decode": "h100:tp=8"}, draft="llama-3.1-8b", tokens=3.0)
    asked = json.loads(server("vllm", found)["--speculative-config"])
    assert asked == {
        "method": "draft_model", "model": "meta-llama/Llama-3.1-8B", "num_speculative_tokens": 3,
    }  # fmt: skip
    asked = server("sglang", found)
    assert asked["--speculative-num-steps"] == "3"
    assert asked["--speculative-num-draft-tokens"] == "4"
    text = export.export("trtllm", found).scripts["serve.sh"]
    assert "  max_draft_len: 3\n" in text and "DraftTarget" in text


def test_draft_layers_of_the_network_itself():
    found = of_system(
        {"decode": "h200:tp=8,ep=8,attention_dp=8"}, draft="mtp", model="deepseek-v3", tokens=1.0
    )
    asked = json.loads(server("vllm", found)["--speculative-config"])
    assert asked == {"method": "mtp", "num_speculative_tokens": 1}
    asked = server("sglang", found)
    assert asked["--speculative-algorithm"] == "EAGLE"
    assert "--speculative-draft-model-path" not in asked
    text = export.export("trtllm", found).scripts["serve.sh"]
    assert "  decoding_type: MTP\n" in text and "  num_nextn_predict_layers: 1\n" in text


def test_a_step_holds_every_request_and_its_drafts():
    # 32 requests, each with a token and 4 drafted ones.
    found = of_system({"decode": "h100:tp=8,chunk=64"}, draft="llama-3.1-8b", tokens=4.0)
    assert server("vllm", found)["--max-num-batched-tokens"] == "160"
    assert server("trtllm", found)["--max_num_tokens"] == "160"
    plain = of_pool(chunk=16)
    assert server("vllm", plain)["--max-num-batched-tokens"] == "32"


def test_tokens_come_in_whole_pages_and_blocks():
    # SGLang's chunks are multiples of a page, TensorRT-LLM's buffers of a block.
    chunks = {16: "64", 1000: "960", 2048: "2048"}
    for chunk, written in chunks.items():
        assert server("sglang", of_pool(chunk=chunk))["--chunked-prefill-size"] == written
    apart = of_system({"prefill": "h100:tp=4", "decode": "h100:tp=4"})
    text = export.export("trtllm", apart).scripts["decode-0.sh"]
    # 5,256 tokens in blocks of 32.
    assert "  max_tokens_in_buffer: 5280\n" in text


def test_states_are_handed_over_in_the_layout_that_can_be():
    pools = {"prefill": "h100:tp=4", "decode": "h100:tp=4"}
    text = export.export("vllm", of_system(pools, model="qwen3-next-80b-a3b")).scripts
    assert "VLLM_SSM_CONV_STATE_LAYOUT=DS" in text["prefill-0.sh"]
    assert "STATE_LAYOUT" not in export.export("vllm", of_system(pools)).scripts["prefill-0.sh"]


def test_a_replica_of_several_nodes():
    wide = of_pool("deepseek-v3", "h200", tp=16, ep=16, attention_dp=16)
    # The first node has no start rank: it would balance its own groups only.
    front = server("vllm", wide, "serve-node0.sh")
    assert front["--data-parallel-size-local"] == "8" and "--headless" not in front
    assert "--data-parallel-start-rank" not in front
    second = server("vllm", wide, "serve-node1.sh")
    assert second["--data-parallel-size-local"] == "8" and "--headless" in second
    assert second["--data-parallel-start-rank"] == "8"
    assert second["--data-parallel-address"] == "$SERVE_0"
    first = server("sglang", wide, "serve-node0.sh")
    assert first["--nnodes"] == "2" and first["--dist-init-addr"] == "$SERVE_0:20000"


def test_keys_are_spread_over_ranks_that_hold_copies():
    # Latent attention has one head of keys, so 8 ranks hold 8 copies; 4 heads of keys leave 2.
    latent = of_pool("deepseek-v3", "h200", cp=8)
    assert server("vllm", latent)["--decode-context-parallel-size"] == "8"
    assert server("sglang", of_pool(MIXTURE, "h200", cp=2))["--dcp-size"] == "2"
    with pytest.raises(InputError, match="cp 4 exceeds the 2 copies"):
        export.export("sglang", of_pool(MIXTURE, "h200", cp=4))


def test_the_smallest_deployment_is_the_first_in_its_formats():
    read = {
        "tp": 1, "pp": 1, "ep": 1, "attention_dp": 1, "cp": 1, "regions": 1, "offload": 0.0,
        "batch": 70, "chunk": 4096, "replicas": 8, "running": 70.0, "e2e_s": 20.0,
        "weight_bytes": 8e9, "activation_bytes": 0.1e9, "memory_margin": 0.66,
    }  # fmt: skip
    found = xr.Dataset(
        {name: ("deployment", [value, value]) for name, value in read.items()}
        | {"binding": ("deployment", ["links", "links"]), "obstacle": ("candidate", ["", ""])},
        {
            "chip": ("deployment", ["h200_sxm", "h100_sxm"]),
            "precision": ("deployment", ["fp8"] * 2),
        },
        {"isl": 4000, "osl": 1000, "prefix_hit": 0.0},
    )
    made = export.of_size("llama-3.1-8b", ["h100", "h200"], found, engine="vllm")
    assert [each.chip.name for each in made.servers] == ["h200_sxm"]
    asked = server("vllm", made)
    assert (asked["--quantization"], asked["--kv-cache-dtype"]) == ("fp8_per_tensor", "fp8")
    assert bench("vllm", made)["--max-concurrency"] == "70"
    own = found.assign_coords(precision=("deployment", ["bf16/bf16/fp8", "bf16"]))
    asked = server("vllm", export.of_size("llama-3.1-8b", ["h200"], own, engine="vllm"))
    assert "--quantization" not in asked and asked["--kv-cache-dtype"] == "fp8"
    text = export.export("vllm", made)
    assert "One of 8 equal replicas" in text.notes[0]


@pytest.mark.slow
def test_the_command_of_a_system(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_ready", lambda: None)
    asked = ["estimate", "llama-3.1-8b", "--prefill", "h100:replicas=2", "--decode", "h100:tp=2"]
    asked += ["--batch", "16", "--isl", "1000", "--osl", "200", "--export", "sglang"]
    assert cli.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["export"]
    names = ["prefill-0.sh", "prefill-1.sh", "decode-0.sh", "router.sh", "bench.sh"]
    assert list(found["scripts"]) == names
    assert "CUDA_VISIBLE_DEVICES=2,3 " in found["scripts"]["decode-0.sh"]
    assert cli.main([*asked, "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert "estimate llama-3.1-8b --prefill h100" in (tmp_path / "router.sh").read_text()


# ---- What engines cannot do is refused in one line ----

REFUSED = {
    "wafers": ("vllm", lambda: of_pool(chip="cs3"), "does not run on wse3"),
    "corsair": ("sglang", lambda: of_pool(chip="corsair"), "does not run on corsair"),
    "another vendor": ("trtllm", lambda: of_pool(chip="mi300x"), "GPUs of NVIDIA"),
    "tpu": ("vllm", lambda: of_pool(chip="tpu_v7"), "GPUs of NVIDIA and AMD"),
    "attention apart": (
        "vllm", lambda: of_system({"attention": "h100:tp=8", "ffn": "h100:tp=8"}),
        "no engine decodes with attention and FFN",
    ),
    "draft apart": (
        "vllm",
        lambda: of_system({"decode": "h100:tp=8", "draft": "h100"}, draft="llama-3.1-8b"),
        "no engine drafts on a pool of its own",
    ),
    "part of a token": (
        "vllm", lambda: of_system({"decode": "h100:tp=8"}, draft="llama-3.1-8b", tokens=2.5),
        "whole tokens, not 2.5",
    ),
    "part of a server": (
        "vllm", lambda: of_system({"prefill": "h100:tp=8,replicas=0.4", "decode": "h100:tp=8"}),
        "(nearest: 1)",
    ),
    "keys spread over heads": ("vllm", lambda: of_pool(cp=2), "(nearest: 1)"),
    "keys spread": ("trtllm", lambda: of_pool(MIXTURE, cp=2), "(nearest: cp 1)"),
    "some experts": ("vllm", lambda: of_pool(MIXTURE, ep=4), "(nearest: ep 8)"),
    "some groups": ("trtllm", lambda: of_pool(MIXTURE, attention_dp=4), "nearest: attention_dp 8"),
    "part of a node": ("vllm", lambda: of_pool(tp=4, pp=3), "whole nodes of 8"),
    "nodes": ("trtllm", lambda: of_pool(tp=16), "(nearest: 8 chips)"),
    "a format": ("vllm", lambda: of_pool(formats={"weights": "int8"}), "makes no int8/int8 of"),
    "a format on loading": ("trtllm", lambda: of_pool(formats={"weights": "fp8"}), "fp8/fp8 of"),
    "a cache": ("sglang", lambda: of_pool(formats={"kv": "int8"}), "no KV cache in int8"),
    "4 bits of latents": (
        "vllm", lambda: of_pool("deepseek-v3", "b200", formats={"kv": "nvfp4"}),
        "no KV cache in nvfp4 of latent attention (nearest: fp8)",
    ),
    "4 bits of another vendor": (
        "vllm", lambda: of_pool(chip="mi355x", formats={"kv": "nvfp4"}), "nvfp4 on mi355x"
    ),
    "4 bits of Hopper": (
        "sglang", lambda: of_pool(formats={"kv": "nvfp4"}), "nvfp4 on h100_sxm"
    ),
    "4 bits with sinks": (
        "vllm", lambda: of_pool("gpt-oss-120b", formats={"kv": "nvfp4"}), "attention with sinks on"
    ),
    "4 bits handed over": (
        "sglang",
        lambda: of_system({"prefill": "b200:tp=4,kv=nvfp4", "decode": "b200:tp=4,kv=nvfp4"}),
        "nvfp4 that is handed over",
    ),
    "16 bits of compressed keys": (
        "sglang", lambda: of_pool("deepseek-v4-flash", "b200", formats={"kv": "bf16"}),
        "no KV cache in bf16 of compressed attention",
    ),
    "two caches": (
        "vllm", lambda: of_system({"prefill": "h100:tp=8,kv=fp8", "decode": "h100:tp=8"}),
        "one KV format, not fp8 and bf16",
    ),
    "keys of uneven heads": (
        "vllm", lambda: of_pool("qwen-2.5-7b", "h100", tp=8, cp=2), "7 query heads of a key"
    ),
    "stages that hand over": (
        "vllm", lambda: of_system({"prefill": "h100:tp=2,pp=2", "decode": "h100:tp=4"}),
        "hands over no caches of pipeline stages (nearest: pp 1)",
    ),
    "a draft and stages": (
        "sglang",
        lambda: of_system({"decode": "h100:tp=4,pp=2"}, draft="llama-3.1-8b"),
        "drafts and pipeline stages exclude each other",
    ),
    "an eagle head": (
        "vllm", lambda: of_system({"decode": "h100:tp=8"}, draft="eagle"),
        "an eagle head has no checkpoint to name",
    ),
    "layers that are not loaded": (
        "sglang", lambda: of_system({"decode": "h200:tp=8"}, draft="mtp", model="minimax-m2.5"),
        "loads no draft layers of MiniMax-M2",
    ),
    "own layers": (
        "trtllm", lambda: of_system({"decode": "h200:tp=8"}, draft="mtp", model="glm-4.6"),
        "own layers of DeepSeek's checkpoints only",
    ),
    "a draft's context": (
        "vllm", lambda: _long_draft(), "50,000 tokens exceed the context of the draft, 40,960",
    ),
    "two vendors": (
        "sglang", lambda: of_system({"prefill": "mi300x:tp=8", "decode": "h100:tp=8"}),
        "chips of one vendor",
    ),
    "a draft and groups": (
        "sglang",
        lambda: dataclasses.replace(
            of_pool(MIXTURE, "h200", attention_dp=8), draft=export.checkpoint(_model("qwen3-0.6b"))
        ),
        "exclude each other",
    ),
    "offload": ("vllm", lambda: of_pool(offload=0.5), "engines know no offload"),
    "no checkpoint": ("vllm", lambda: of_pool("palm-540b"), "no checkpoint of palm-540b is public"),
    "caches of two kinds": (
        "trtllm",
        lambda: of_system({"prefill": "h100:tp=8", "decode": "h100:tp=8"}, model="gpt-oss-120b"),
        "no caches that differ between layers",
    ),
    "unknown": ("vlm", of_pool, "unknown engine 'vlm' (nearest: vllm"),
}  # fmt: skip


def _long_draft():
    """Returns prompts longer than the context of the model that drafts."""
    where, named = systems.table({"decode": "h100:tp=8"}, None)
    spec = {"draft": "qwen3-0.6b", "spec": systems.acceptance(4.0, 0.8, None)}
    made = systems.ask("qwen3-next-80b-a3b", named, where, batch=1, isl=40_000, osl=10_000, **spec)
    found = xr.Dataset(
        {
            "e2e_s": 20.0, "running": 1.0, "binding": "links",
            "pool_memory_margin": ("pool", [0.3]), "pool_weight_bytes": ("pool", [20e9]),
        },
        {"pool": list(made.pools)},
        {"isl": 40_000, "osl": 10_000, "prefix_hit": 0.0, "batch": 1},
    )  # fmt: skip
    return export.of_system(made, found, "qwen3-0.6b", 4.0)


def _model(name):
    from perfmodel.models.catalogue import load_model

    return load_model(name)


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_engine_cannot_do_is_refused_in_a_line(case):
    engine, make, told = REFUSED[case]
    with pytest.raises(InputError) as caught:
        export.export(engine, make())
    line = str(caught.value)
    assert told in line and line.startswith("--export: ") and "\n" not in line and len(line) < 200


@pytest.mark.parametrize(
    "options",
    [
        ["--class", "chat=1000:100:1"],
        ["--batching", "static"],
        ["--kv", "reserved"],
        ["--draft", "llama-3.1-8b", "--acceptance", "0.8", "--draft-candidates", "2"],
        ["--images", "1"],
    ],
)
def test_what_commands_do_not_know_is_refused_before_anything_runs(options, capsys):
    asked = ["estimate", "llama-3.3-70b", "h100", "--tp", "8", "--export", "vllm"]
    assert cli.main([*asked, *options]) == 2
    assert "--export: commands know no --" in capsys.readouterr().err


def test_what_cannot_run_is_not_exported():
    with pytest.raises(Infeasible):
        of_pool(e2e_s=float("nan"))
    assert _export_command.scripts("vllm", lambda: of_pool(e2e_s=float("nan"))) is None
