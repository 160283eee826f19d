"""Python, and the packages of each vllm command's environment."""

from collections.abc import Iterator

from eccon.doctor.evidence import Evidence, Launcher
from eccon.doctor.finding import Finding, bad, good, note, warn
from eccon.launch import guard as guarding
from eccon.launch.connectors import RBLN_CONNECTOR
from eccon.launch.versions import number
from eccon.launch.versions import vllm as release_of

__all__ = [
    "guard",
    "guard_levels",
    "package_pairs",
    "package_versions",
    "python_versions",
    "releases",
    "same_versions",
    "transport",
]

PYTHONS = ((3, 10), (3, 13))
FIRST_WITH_CONNECTOR = (0, 10, 3)
PINS = {
    (0, 10, 3): "0.18.0",
    (0, 10, 4): "0.18.0",
    (0, 11, 0): "0.22.0",
    (0, 11, 1): "0.22.0",
    (0, 11, 2): "0.24.0",
    (0, 12): "0.30.0",
}
"""The vllm that each vllm-rbln pins, by their own metadata."""


def _named(launcher: Launcher) -> str:
    names = launcher.processes
    return f"{launcher.command} ({names[0] if len(names) == 1 else f'{names[0]} … {names[-1]}'})"


def python_versions(e: Evidence) -> Iterator[Finding]:
    """3.10 to 3.13, here and there."""
    rows = [("eccon", e.python), *((_named(x), x.python) for x in e.launchers if x.path)]
    for name, version in rows:
        if not version:
            yield note("python", f"{name}: its Python cannot be told")
        elif PYTHONS[0] <= number(version)[:2] <= PYTHONS[1]:
            yield good("python", f"{name} runs Python {version}")
        else:
            advice = "use Python 3.10 to 3.13"
            yield bad("python", f"{name} runs Python {version}", version, advice=advice)


def package_versions(e: Evidence) -> Iterator[Finding]:
    """vllm, and with NPUs vllm-rbln that has the connector."""
    for launcher in e.launchers:
        name = _named(launcher)
        if not launcher.path:
            advice = "install vLLM there, or set launcher.vllm to the command's path"
            yield bad("vllm", f"{launcher.command}: no such command", advice=advice)
            continue
        seen = ", ".join(f"{k} {v}" for k, v in launcher.packages.items())
        if "vllm" not in launcher.packages:
            advice = "install vLLM into the environment of that command"
            yield bad("vllm", f"{name} has no vllm in its environment", launcher.path, advice=advice)
        else:
            yield good("vllm", f"{name}: {seen}", launcher.path)
        if e.topology.devices.kind != "rbln":
            continue
        rbln = launcher.packages.get("vllm-rbln")
        if rbln is None:
            advice = "pip install vllm-rbln there, by the vendor's index"
            yield bad("vllm-rbln", f"{name} has no vllm-rbln", seen, advice=advice)
        elif number(rbln) < FIRST_WITH_CONNECTOR and e.topology.connector.kind == RBLN_CONNECTOR:
            advice = "install vllm-rbln 0.10.3 or later"
            yield bad("vllm-rbln", f"vllm-rbln {rbln} has no {RBLN_CONNECTOR}", seen, advice=advice)
        for package in ("optimum-rbln", "rebel-compiler"):
            if rbln is not None and package not in launcher.packages:
                advice = f"pip install {package} there"
                yield warn("vllm-rbln", f"{name} has no {package}", seen, advice=advice)


def package_pairs(e: Evidence) -> Iterator[Finding]:
    """What belongs together, as vllm-rbln pins it."""
    for launcher in e.launchers:
        rbln, optimum = (launcher.packages.get(p) for p in ("vllm-rbln", "optimum-rbln"))
        vllm = launcher.packages.get("vllm")
        if rbln is None or vllm is None:
            continue
        pin = PINS.get(number(rbln)[:3]) or PINS.get(number(rbln)[:2])
        evidence = f"vllm-rbln {rbln}, vllm {vllm}"
        if pin is None:
            yield note("pair", f"vllm-rbln {rbln}: which vllm it wants is not known here", evidence)
        elif number(vllm)[:3] != number(pin)[:3]:
            advice = f"install vllm {pin}, or the vllm-rbln that wants {vllm}"
            yield bad("pair", f"vllm-rbln {rbln} wants vllm {pin}, {vllm} is there", evidence, advice=advice)
        else:
            yield good("pair", f"vllm-rbln {rbln} and vllm {vllm} belong together")
        if optimum is not None and number(optimum)[:2] != number(rbln)[:2]:
            advice = "install the same minor version of both"
            yield warn("pair", f"optimum-rbln {optimum} is beside vllm-rbln {rbln}", evidence, advice=advice)


def releases(e: Evidence) -> Iterator[Finding]:
    """What a release of vLLM does otherwise than those before it."""
    for launcher in e.launchers:
        version = launcher.packages.get("vllm")
        if told := release_of(version).told:
            yield note("vllm-release", f"{_named(launcher)}, vllm {version}: {told}")


def same_versions(e: Evidence) -> Iterator[Finding]:
    """Of all commands: the wire between encoder and PD changed with 0.12, and hashes with vllm."""
    found = {
        p: {x.packages[p] for x in e.launchers if p in x.packages} for p in ("vllm-rbln", "vllm", "nixl")
    }
    for package, versions in found.items():
        if len(versions) > 1:
            advice = "run PD and encoders from the same environment"
            yield bad("same-version", f"PD and encoders run {package} {' and '.join(sorted(versions))}",
                      advice=advice)  # fmt: skip


def transport(e: Evidence) -> Iterator[Finding]:
    """NIXL and UCX, which carry the encodings."""
    if e.topology.connector.kind != RBLN_CONNECTOR:
        return
    for launcher in e.launchers:
        if not launcher.path:
            continue
        failed = launcher.imports.get("nixl")
        name = _named(launcher)
        if "nixl" not in launcher.packages:
            advice = "pip install nixl into that environment"
            yield bad("nixl", f"{name} has no nixl, which {RBLN_CONNECTOR} needs", advice=advice)
        elif failed:
            advice = "reinstall nixl there; `python -c 'import nixl'` shows the whole error"
            yield bad("nixl", f"{name} cannot import nixl", failed, advice=advice)
        elif not launcher.ucx:
            advice = "reinstall nixl with its plugins, or set connector.extra.backends to one that is there"
            yield bad("nixl", f"{name}: NIXL has no UCX plugin", advice=advice)
        else:
            how = "imported" if failed == "" else "there"
            yield good("nixl", f"{name}: nixl {launcher.packages['nixl']} with UCX, {how}")


def guard(e: Evidence) -> Iterator[Finding]:
    """Whether a crashing encoder takes the PD along."""
    if e.topology.connector.kind != RBLN_CONNECTOR or e.topology.launcher.kind != "vllm":
        return
    modes = {guarding.mode(e.topology, x.command) for x in e.launchers if x.path}
    evidence = f"connector.guard = {e.topology.connector.guard}"
    if modes and "off" not in modes:
        yield good("guard", "the connector is guarded: the PD survives an encoder's crash", evidence)
        if e.topology.devices.kind == "rbln":
            text = "the guard was proven on CPUs: the vendor's runner, worker and NPU memory were not at hand"
            advice = (
                "look for the level in `eccon status --json`, and kill an encoder once before you rely on it"
            )
            yield note("guard-unproven", text, evidence, advice)
    elif modes:
        advice = 'drain before you stop an encoder (`eccon restart` does), or set connector.guard = "on"'
        text = "the connector is not guarded: an encoder that crashes with items staged takes the PD along"
        if e.topology.connector.guard == "auto" and e.topology.launcher.profile == "safe":
            pairs = " or ".join(f"vllm {v} with vllm-rbln {r}" for v, r in sorted(guarding.PROVEN))
            evidence += f", which is on with what it was proven with only: {pairs}"
        yield note("guard", text, evidence, advice)


LEVELS = {
    "gate": "vLLM asks the guard before it schedules; a lost image fails its request alone",
    "wrap": "the scheduler is wrapped to ask the guard; a lost image fails its request alone",
    "hooks": "a lost image stalls the engine for connector.guard_wait_s, then fails its request",
    "vendor": "the guard stepped down to the vendor's connector; a lost image ends the PD",
    "off": "the vendor's connector, not guarded; a lost image ends the PD",
}
"""What each level means to a request."""


def guard_levels(e: Evidence) -> Iterator[Finding]:
    """What of the guard is in force in the processes that run."""
    for level, meaning in LEVELS.items():
        names = [name for name, told in e.guards if told == level]
        if not names:
            continue
        text = f"{level} in {', '.join(names)}: {meaning}"
        if level in {"hooks", "vendor"}:
            advice = "`eccon logs NAME | grep 'EC guard'` says why; run the versions that it was proven with"
            yield warn("guard-level", text, advice=advice)
        else:
            yield note("guard-level", text)
