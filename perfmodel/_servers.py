"""Servers of a deployment as an engine would start them: what each does, where it runs, and shells.

A `Deployment` is what `perfmodel.export` reads from a result; `perfmodel._launch_vllm` and its like
write it as the commands of one engine.
"""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from perfmodel.chips import Chip
from perfmodel.errors import InputError
from perfmodel.formats import PrecisionName
from perfmodel.models.catalogue import ModelEntry
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.mla import LatentAttention
from perfmodel.models.recurrent import Recurrent

LOCAL = "127.0.0.1"


class Shell(str):
    """A word that is shell syntax already, such as a variable in double quotes."""


Flag = tuple[str, object]
"""A flag and its value; None where it takes none."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Weights by the name or folder that an engine loads, and the network that they are of."""

    path: str
    entry: ModelEntry


@dataclasses.dataclass(frozen=True)
class Server:
    """One kind of server of a deployment.

    Fields:
        role: "serve", or "prefill" or "decode" where they are apart.
        tp, pp, ep, attention_dp, cp: as of `perfmodel.estimate`.
        replicas: equal servers.
        chunk: most prompt tokens in a step of an attention group.
        sequences: requests that a server works on at once.
        length: most tokens of a request, prompt and output.
        fraction: share of a chip's memory that the engine takes.
        static: share of it that holds weights, keys and values.
        pool: share for keys and values, of what weights and everything else leave.
    """

    role: str
    chip: Chip
    tp: int
    pp: int
    ep: int
    attention_dp: int
    cp: int
    replicas: int
    chunk: int
    sequences: int
    length: int
    fraction: float
    static: float
    pool: float
    precision: PrecisionName

    @property
    def chips(self) -> int:
        """Chips of one server."""
        return self.tp * self.pp

    @property
    def per_node(self) -> int:
        """Chips of a node; those of this server where the chip does not say."""
        return int(self.chip.fields["chips_per_node"].value or self.chips)

    @property
    def nodes(self) -> int:
        """Nodes of one server."""
        return -(-self.chips // self.per_node)


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What is to be started and measured.

    Fields: the checkpoint, servers by role, prompt and output tokens, tokens of the prompt that
    requests `share`, `concurrency` of what is started, tokens drafted in a cycle (0 for none), and
    the draft's checkpoint (None where the network's own draft layers draft).
    """

    model: Checkpoint
    servers: tuple[Server, ...]
    isl: int
    osl: int
    shared: int
    concurrency: int
    draft: Checkpoint | None = None
    draft_tokens: int = 0

    @property
    def own_draft(self) -> bool:
        """Whether the network's own draft layers draft (multi-token prediction)."""
        return self.draft_tokens > 0 and self.draft is None

    @property
    def apart(self) -> bool:
        """Whether prompts are computed on servers of their own."""
        return len(self.servers) > 1


@dataclasses.dataclass(frozen=True)
class Process:
    """One command to be started: a server, or the part of it that one node runs.

    Fields: `index` of the server in its role, `node` of the server, `host` (a name, or a variable),
    host of the server's first node in `head`, and the `devices` of the node, None for the first.
    """

    server: Server
    index: int
    node: int
    host: str
    head: str
    devices: tuple[int, ...] | None

    @property
    def file(self) -> str:
        """Name of the script that starts it."""
        parts = [self.server.role]
        if self.server.role != "serve":
            parts.append(str(self.index))
        if self.server.nodes > 1:
            parts.append(f"node{self.node}")
        return "-".join(parts) + ".sh"


def processes(deployment: Deployment) -> list[Process]:
    """Returns every command of a deployment, each with the host and devices that it runs on.

    Of equal replicas of one pool only the first: the others are started alike. Servers of prefill
    and decode share a node where it holds all of them; else each role packs nodes of its own.
    """
    servers = deployment.servers
    if not deployment.apart:
        (only,) = servers
        hosts = [LOCAL] if only.nodes == 1 else [f"SERVE_{k}" for k in range(only.nodes)]
        return [Process(only, 0, k, host, hosts[0], None) for k, host in enumerate(hosts)]
    kinds = {server.chip.name for server in servers}
    total = sum(server.chips * server.replicas for server in servers)
    together = len(kinds) == 1 and total <= min(server.per_node for server in servers)
    found: list[Process] = []
    first = 0
    for server in servers:
        fits = max(server.per_node // server.chips, 1)
        for index in range(server.replicas):
            if server.nodes > 1:
                hosts = [f"{server.role.upper()}_{index}_{k}" for k in range(server.nodes)]
                parts = enumerate(hosts)
                found += [Process(server, index, k, host, hosts[0], None) for k, host in parts]
                continue
            host = LOCAL if together else f"{server.role.upper()}_{index // fits}"
            start = first if together else index % fits * server.chips
            devices = tuple(range(start, start + server.chips))
            found.append(Process(server, index, 0, host, host, devices))
            first += server.chips
    return found


def host(name: str) -> Shell:
    """Returns a host as a word: itself, or the variable that holds it.

    >>> host("127.0.0.1"), host("DECODE_0")
    ('127.0.0.1', '"$DECODE_0"')
    """
    return Shell(name if name == LOCAL else f'"${name}"')


def url(name: str, port: int, scheme: str = "http://") -> Shell:
    """Returns the address of a server as a word.

    >>> url("DECODE_0", 8200)
    '"http://$DECODE_0:8200"'
    """
    return Shell(f"{scheme}{name}:{port}" if name == LOCAL else f'"{scheme}${name}:{port}"')


def variables(names: Sequence[str]) -> str:
    """Returns lines that set the variables of hosts to what is to be put there, each once.

    >>> print(variables(["127.0.0.1", "DECODE_0", "DECODE_0"]))
    DECODE_0=${DECODE_0:-decode-0}  # host name or address
    """
    return "\n".join(
        f"{name}=${{{name}:-{name.lower().replace('_', '-')}}}  # host name or address"
        for name in dict.fromkeys(names)
        if name != LOCAL
    )


def quoted(word: object) -> str:
    """Returns a word as a shell reads it back.

    >>> quoted("a b"), quoted(Shell('"$HOST"')), quoted(8)
    ("'a b'", '"$HOST"', '8')
    """
    return str(word) if isinstance(word, Shell) else shlex.quote(str(word))


def command(
    program: Sequence[object],
    flags: Sequence[Flag],
    environment: Mapping[str, object] | None = None,
) -> str:
    """Returns a command with a flag on each line; flags whose value is a tuple take all of it.

    >>> print(command(["vllm", "serve", "a b"], [("--port", 8000), ("--headless", None)]))
    vllm serve 'a b' \\
      --port 8000 \\
      --headless
    """
    lines = [f"{name}={quoted(value)}" for name, value in (environment or {}).items()]
    lines.append(" ".join(map(quoted, program)))
    for flag, value in flags:
        words = value if isinstance(value, tuple) else () if value is None else (value,)
        lines.append("  " + " ".join([flag, *map(quoted, words)]))
    return " \\\n".join(lines)


def here(file: str, lines: Sequence[str]) -> str:
    """Returns the shell command that writes lines to a file as they are."""
    return "\n".join([f"cat > {quoted(file)} <<'END'", *lines, "END"])


def scripts(found: Sequence[Process], commands: Mapping[str, str]) -> dict[str, str]:
    """Returns commands by file name with the variables of hosts that they use before them."""
    names = [name for process in found for name in (process.host, process.head)]
    texts = {}
    for file, text in commands.items():
        used = variables([name for name in names if f"${name}" in text])
        texts[file] = f"{used}\n{text}" if used else text
    return texts


def kv_heads(model: ModelEntry) -> int:
    """Returns the heads of keys of a network, 1 where all heads share them."""
    return max(int(getattr(block.body, "kv_heads", 1)) for block in model.model.attention)


def query_heads(model: ModelEntry) -> int:
    """Returns the heads of queries that share a head of keys, 1 where a layer keeps no keys."""
    bodies = [block.body for block in model.model.attention]
    return max(int(getattr(b, "heads", 1)) // int(getattr(b, "kv_heads", 1)) for b in bodies)


def latent(model: ModelEntry) -> bool:
    """Returns whether layers keep latents instead of keys."""
    kinds = (LatentAttention, CompressedAttention)
    return any(isinstance(block.body, kinds) for block in model.model.attention)


def recurrent(model: ModelEntry) -> bool:
    """Returns whether layers keep a state instead of keys."""
    return any(isinstance(block.body, Recurrent) for block in model.model.attention)


def hybrid(model: ModelEntry) -> bool:
    """Returns whether layers keep different things: states, windows, or all keys."""
    kinds = {(type(b.body), getattr(b.body, "window", None) is None) for b in model.model.attention}
    return len(kinds) > 1


def refuse(engine: str, words: str, nearest: str = "") -> InputError:
    """Returns the error for what an engine cannot do.

    >>> str(refuse("vLLM 0.33.0", "no wafers", "h100"))
    '--export: vLLM 0.33.0: no wafers (nearest: h100)'
    """
    return InputError(
        f"--export: {engine}: {words}" + (f" (nearest: {nearest})" if nearest else "")
    )
