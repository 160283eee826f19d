"""`python -m eccon.sim serve MODEL …`: from the command line to a running server."""

import logging
import sys
import traceback
from collections.abc import Sequence

from eccon.sim import flags, logs, milestones, modeldir, server, tunables
from eccon.sim.release import release

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 2 for a command line that cannot be used, 1 for what fails later."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        version = release().version
    except tunables.TunableError as e:
        sys.stderr.write(f"{e}\n")
        return 2
    if args[:1] in (["--version"], ["-v"]):
        sys.stdout.write(version + "\n")
        return 0
    if args[:1] != ["serve"]:
        sys.stderr.write("usage: python -m eccon.sim serve MODEL [the flags of `vllm serve`]\n")
        return 2
    try:
        settings = tunables.load()
        serve = flags.parse(args[1:])
    except (flags.FlagError, tunables.TunableError) as e:
        sys.stderr.write(f"{e}\n")
        return 2
    logs.prefix("APIServer")
    try:
        logs.configure()
    except logs.LogError as e:
        sys.stderr.write(f"{e}\n")
        return 1
    milestones.banner(serve)
    try:
        sock = server.bind(serve)
    except OSError:
        traceback.print_exc()
        return 1
    with sock:
        try:
            model = modeldir.load(serve.model, serve.mm_processor_kwargs)
        except modeldir.ModelError as e:
            sys.stderr.write(f"{e}\n")
            return 1
        if serve.max_model_len is not None:
            model = modeldir.shortened(model, serve.max_model_len)
        milestones.config(model, model.max_model_len)
        try:
            return server.run(serve, model, settings, sock)
        except KeyboardInterrupt:
            return 130
        finally:
            logging.shutdown()
