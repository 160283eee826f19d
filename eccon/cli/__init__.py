"""The `eccon` command. Each family of commands is its own module, imported when one of it is run.

Exit codes: 0 done; 1 the cluster refused or failed; 2 wrong usage, bad configuration, or a check before the
start that failed (nothing was started); 3 no daemon runs for this cluster; 4 time ran out; 130 interrupted.
What a command was asked for goes to stdout; everything said about it goes to stderr.
"""

import importlib
import sys

import click

from eccon import __version__

__all__ = ["main"]

COMMANDS = {
    "up": ("cluster", "Start the daemon and the cluster; show progress until it is ready."),
    "down": ("cluster", "Stop every process of the cluster, and the daemon."),
    "status": ("cluster", "What runs, and how it is."),
    "restart": ("processes", "Restart one process; an encoder is drained first."),
    "start": ("processes", "Start one stopped process."),
    "stop": ("processes", "Stop one process; an encoder is drained first."),
    "add": ("processes", "Add an encoder on the next free device and port."),
    "remove": ("processes", "Drain an encoder, stop it and take it out of the cluster."),
    "drain": ("rotation", "Give an encoder no more items, until `resume`."),
    "resume": ("rotation", "Give an encoder items again."),
    "roll": ("rotation", "Restart all encoders, each when the one before serves again."),
    "scale": ("processes", "Add or remove encoders until there are so many."),
    "reload": ("cluster", "Read eccon.toml again and apply what changed."),
    "logs": ("processes", "Print a process's log."),
    "events": ("events", "Print what happened in the cluster."),
    "diagnostics": ("diagnostics", "Write a bundle for a report: states, configuration, logs; no secrets."),
    "send": ("requests", "Send a test prompt with images through the proxy."),
    "traces": ("requests", "List the newest requests, or one's way through the cluster."),
    "init": ("config", "Write a commented eccon.toml."),
    "config": ("config", "Show or check the configuration."),
    "compile": ("compile", "Compile the model for the topology's NPUs, by optimum-rbln."),
    "doctor": ("doctor", "Check host, packages, devices, model and ports; --smoke tries every encoder."),
    "export": ("export", "Write launch scripts or systemd units that start the same."),
    "demo": ("demo", "One PD, four encoders and the proxy on the stand-in for vLLM."),
    "lab": ("lab", "Real vLLM with the real connector on a CPU: make it, start it, stop it."),
    "record": ("replay", "Write what the cluster does into a file."),
    "replay": ("replay", "Show a recording in the console, at any speed."),
    "attach": ("console", "Open the console on a running cluster's control socket, or on a proxy alone."),
    "web": ("web", "Serve the console to browsers of this machine."),
}
GROUPS = ("config", "export")
"""Those with commands of their own below them."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"eccon.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name}_group" if cmd_name in GROUPS else cmd_name)
        assert isinstance(command, click.Command)  # noqa: S101  the table above and the module agree
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """From the table, so that `--help` imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(
    cls=_Lazy,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 refused or failed, 2 usage or configuration, 3 not running, "
    "4 time ran out, 130 interrupted.",
)
@click.option(
    "-f", "--file", "file", metavar="FILE", help="eccon.toml; else ECCON_CONFIG, else ./eccon.toml."
)
@click.option("--read-only", is_flag=True, help="The console may look and not act.")
@click.option("--theme", metavar="NAME", help="The console's theme.")
@click.version_option(__version__, prog_name="eccon")
@click.pass_context
def _main(ctx: click.Context, file: str | None, read_only: bool, theme: str | None) -> None:
    """Run and watch an encoder-disaggregated vLLM cluster. Without a command: open the console."""
    ctx.obj = file
    if ctx.invoked_subcommand is None:
        from eccon.cli import console  # noqa: PLC0415  only this command draws

        sys.exit(console.open_at_hand(file, read_only=read_only, theme=theme))


def main() -> None:
    """Console script."""
    _main(prog_name="eccon")
