"""The checks, in the order in which an operator would mend what they find."""

from collections.abc import Callable, Iterator

from eccon.doctor.checks import devices, host, login, model, network, packages, topology
from eccon.doctor.evidence import Evidence
from eccon.doctor.finding import Finding

__all__ = ["CHECKS", "examine"]

CHECKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    packages.python_versions,
    packages.package_versions,
    packages.package_pairs,
    packages.releases,
    packages.same_versions,
    packages.transport,
    packages.guard,
    packages.guard_levels,
    devices.tool_and_driver,
    devices.present,
    devices.free_and_grouped,
    devices.well,
    model.is_compiled,
    model.device_counts,
    model.compiler_version,
    model.files_complete,
    model.image_size,
    model.batch_buckets,
    topology.same_model_and_pixels,
    topology.forbidden_flags,
    topology.connector_bounds,
    topology.connector_parameters,
    topology.secrets,
    network.ports_free,
    network.twins,
    network.pull_port,
    network.exposed,
    network.ephemeral,
    host.open_files,
    host.shared_memory,
    host.cpus,
    host.disk,
    host.clock,
    login.outlives_the_session,
)


def examine(evidence: Evidence) -> list[Finding]:
    """Every finding of every check."""
    return [finding for check in CHECKS for finding in check(evidence)]
