"""A bash script that each node of a group runs, and the one for the router.

Needs pydantic. The other kinds of manifest start these scripts. A script holds one command for each
rank, word for word, so that it can be read, compared and parsed back. The only things left open are
the addresses: of the head and of the node itself.
"""

from __future__ import annotations

import re
import shlex

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kimik3_lab.deploy.command import HEAD, SELF, Deployment, GroupPlan

__all__ = ["NodeCommand", "NodeScript", "RouterScript", "node_script", "router_script"]

_FROZEN = ConfigDict(frozen=True, extra="forbid")
_TOKENS = {HEAD: "${K3_HEAD}", SELF: "${K3_SELF}"}
#: What bash would act on inside double quotes, and ends of lines.
_LIVE = re.compile(r"[$`\\\n\r\0]")
#: Addresses, because engines listen on them; a name is looked up, and may need a moment to appear.
_ADDRESS = """\
address() {
  local found try
  for try in $(seq 60); do
    if found="$(getent ahosts "$1")"; then printf '%s' "${found%% *}"; return; fi
    sleep 1
  done
  echo "no address is known for $1" >&2
  return 1
}
"""


class NodeCommand(BaseModel):
    """What one rank runs. Words may hold :data:`~kimik3_lab.deploy.command.HEAD` and ``SELF``."""

    model_config = _FROZEN

    rank: int = Field(ge=0)
    host: str = Field(min_length=1)
    environment: dict[str, str]
    words: tuple[str, ...] = Field(min_length=3)

    @model_validator(mode="after")
    def _plain(self) -> NodeCommand:
        for text in (*self.words, *self.environment.values(), self.host):
            if _LIVE.search(text):
                raise ValueError(
                    f"bash would act on {text!r}: $, `, \\ and line ends are not plain"
                )
        for name in self.environment:
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
                raise ValueError(f"{name!r} is no name of a variable")
        if "vllm" not in self.words or self.words[self.words.index("vllm") + 1] != "serve":
            raise ValueError(f"no command of vLLM: {shlex.join(self.words)}")
        return self

    @property
    def arguments(self) -> tuple[str, ...]:
        """What follows ``vllm serve``."""
        return self.words[self.words.index("vllm") + 2 :]


class NodeScript(BaseModel):
    """One group's script; ``head`` is where it looks unless ``K3_HEAD`` says otherwise."""

    model_config = _FROZEN

    title: str = Field(pattern=r"^[^\n]+$")
    role: str = Field(pattern=r"^[a-z]+$")
    commands: tuple[NodeCommand, ...] = Field(min_length=1)

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.role}.sh"

    @property
    def head(self) -> str:
        """Address of rank 0."""
        return self.commands[0].host

    @model_validator(mode="after")
    def _ranks(self) -> NodeScript:
        ranks = [command.rank for command in self.commands]
        if ranks != list(range(len(ranks))):
            raise ValueError(f"ranks must count from 0 without a gap, got {ranks}")
        return self

    def render(self) -> str:
        """Text of the script."""
        last = len(self.commands) - 1
        lines = [
            "#!/usr/bin/env bash",
            f"# {self.title}",
            f"# Run on every node: bash {self.name} RANK (0 to {last}; 0 is the head).",
            "set -euo pipefail",
            _ADDRESS.rstrip("\n"),
            f'rank="${{1:-${{K3_RANK:-${{LWS_WORKER_INDEX:?give the rank, 0 to {last}}}}}}}"',
            f'K3_HEAD="$(address "${{K3_HEAD:-${{LWS_LEADER_ADDRESS:-{self.head}}}}}")"',
            'case "${rank}" in',
        ]
        for command in self.commands:
            lines += [
                f"  {command.rank})",
                f'    K3_SELF="$(address "${{K3_SELF:-{command.host}}}")"',
                *(
                    f"    export {name}={_quote(value)}"
                    for name, value in command.environment.items()
                ),
                "    exec " + " \\\n      ".join(_lines(command.words)),
                "    ;;",
            ]
        lines += [
            f'  *) echo "no rank ${{rank}}: expected 0 to {last}" >&2; exit 64 ;;',
            "esac",
        ]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> NodeScript:
        """Read a rendered script back.

        Raises
        ------
        ValueError
            If it is not of the form that :meth:`render` writes.
        """
        title = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
        name = re.search(r"^# Run on every node: bash ([a-z]+)\.sh RANK", text, flags=re.MULTILINE)
        if title is None or name is None:
            raise ValueError("no script of k3lab deploy: its heading is missing")
        body = text.partition('case "${rank}" in\n')[2].replace(" \\\n", " ")
        commands = []
        for found in re.finditer(
            r"^  (\d+)\)\n(.*?)^    ;;$", body, flags=re.MULTILINE | re.DOTALL
        ):
            commands.append(_command(int(found[1]), found[2]))
        return cls(title=title[1], role=name[1], commands=tuple(commands))


def _command(rank: int, branch: str) -> NodeCommand:
    host, environment, words = "", {}, []
    for line in branch.splitlines():
        own = re.fullmatch(r'    K3_SELF="\$\(address "\$\{K3_SELF:-([^}]+)\}"\)"', line)
        first, *rest = [_back(word) for word in shlex.split(line)] if own is None else ["K3_SELF"]
        if own is not None:
            host = own[1]
        elif first == "export" and len(rest) == 1:
            name, _, value = rest[0].partition("=")
            environment[name] = value
        elif first == "exec":
            words = rest
        else:
            raise ValueError(f"rank {rank}: {line.strip()!r} is no line of k3lab deploy")
    return NodeCommand(rank=rank, host=host, environment=environment, words=tuple(words))


class RouterScript(BaseModel):
    """Starts the router. Words may hold ``@host0@``, ``@host1@`` ... for the nodes' addresses."""

    model_config = _FROZEN

    hosts: tuple[str, ...] = Field(min_length=2)
    words: tuple[str, ...] = Field(min_length=3)

    @model_validator(mode="after")
    def _known(self) -> RouterScript:
        for text in (*self.words, *self.hosts):
            if _LIVE.search(text):
                raise ValueError(f"bash would act on {text!r}")
        for number in re.findall(r"@host(\d+)@", " ".join(self.words)):
            if int(number) >= len(self.hosts):
                raise ValueError(f"host {number} of {len(self.hosts)} does not exist")
        return self

    name: str = "router.sh"

    def render(self) -> str:
        """Text of the script."""
        words = []
        for word in self.words:
            filled = re.sub(r"@host(\d+)@", r"${hosts[\1]}", word)
            words.append(f'"{filled}"' if filled != word else shlex.quote(word))
        lines = [
            "#!/usr/bin/env bash",
            "# Sends each request to prefill, then to decode.",
            "set -euo pipefail",
            f'read -r -a hosts <<< "${{K3_HOSTS:-{" ".join(self.hosts)}}}"',
            "exec " + " \\\n  ".join(_joined(words)),
        ]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> RouterScript:
        """Read a rendered script back."""
        hosts = re.search(r'"\$\{K3_HOSTS:-([^}]+)\}"', text)
        command = re.search(r"^exec (.*)\Z", text.replace(" \\\n", " "), re.MULTILINE | re.DOTALL)
        if hosts is None or command is None:
            raise ValueError("no router script of k3lab deploy")
        words = [re.sub(r"\$\{hosts\[(\d+)\]\}", r"@host\1@", w) for w in shlex.split(command[1])]
        return cls(hosts=tuple(hosts[1].split()), words=tuple(words))


def _lines(words: tuple[str, ...]) -> list[str]:
    """Quoted words, an option and its value together."""
    return _joined([_quote(word) for word in words])


def _joined(quoted: list[str]) -> list[str]:
    lines: list[str] = []
    for word in quoted:
        alone = word.startswith("--") or not lines
        if alone or (lines[-1].startswith("--") and " " in lines[-1]):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


def _quote(word: str) -> str:
    """Quote a word for bash; the two addresses stay open."""
    filled = word
    for token, variable in _TOKENS.items():
        filled = filled.replace(token, variable)
    if filled == word:
        return shlex.quote(word)
    if '"' in filled:
        raise ValueError(f"an address inside quotes cannot be left open: {word!r}")
    return f'"{filled}"'


def _back(word: str) -> str:
    for token, variable in _TOKENS.items():
        word = word.replace(variable, token)
    return word


def node_script(deployment: Deployment, group: GroupPlan) -> NodeScript:
    """Script of one group.

    Examples
    --------
    >>> from kimik3_lab.deploy.plan import plan
    >>> from kimik3_lab.deploy.spec import DeploymentSpec
    >>> deployment = plan(DeploymentSpec(hardware="b200", nodes=2))
    >>> script = node_script(deployment, deployment.groups[0])
    >>> NodeScript.parse(script.render()) == script
    True
    """
    spec = deployment.spec
    title = f"Kimi K3 on vLLM {spec.vllm}: {group.role}, {group.layout}, {spec.hardware}"
    return NodeScript(
        title=title,
        role=group.role,
        commands=tuple(
            NodeCommand(
                rank=node.rank,
                host=node.host,
                environment=node.environment(HEAD, SELF),
                words=("vllm", "serve", *node.arguments(HEAD, SELF)),
            )
            for node in group.nodes
        ),
    )


def router_script(deployment: Deployment) -> RouterScript | None:
    """Script of the router; None if there is nothing to route."""
    if deployment.router is None:
        return None
    hosts = tuple(node.host for node in deployment.nodes)
    numbers = {f"http://{host}:": f"http://@host{i}@:" for i, host in enumerate(hosts)}
    words = []
    for word in deployment.router:
        for literal, token in numbers.items():
            word = word.replace(literal, token)
        words.append(word)
    return RouterScript(hosts=hosts, words=tuple(words))
