"""Nothing of the table of actions is missing anywhere: keys, handlers, footer, palette, help, commands."""

from pathlib import Path

import click
import pytest
from textual.app import App

import eccon
from eccon import cli
from eccon.console import actions, keymap, manual
from eccon.console.app import ConsoleApp
from eccon.console.proxysource import ProxySource
from eccon.console.replay import Replay
from eccon.console.screens.base import ConsoleScreen
from eccon.console.screens.charts import Charts
from eccon.console.screens.detail import Detail
from eccon.console.screens.dialogs import HELP_MARGIN, Help
from eccon.console.screens.events import Events
from eccon.console.screens.logs import Logs
from eccon.console.screens.overview import Overview
from eccon.console.screens.trace import TraceScreen
from eccon.console.screens.traces import Traces
from eccon.console.source import OF_RECORDINGS
from eccon.console.widgets.rows import Rows
from tests.console import states

SCREENS: dict[str, type[ConsoleScreen]] = {
    s.SCOPE: s for s in (Overview, Charts, Detail, Traces, TraceScreen, Logs, Events)
}
PAIRS = [(scope, a) for scope in actions.SCOPES for a in actions.in_scope(scope)]


def test_every_scope_is_a_screen() -> None:
    assert set(SCREENS) == set(actions.SCOPES)


@pytest.mark.parametrize(("scope", "action"), PAIRS, ids=lambda v: getattr(v, "name", v))
def test_every_action_has_a_key_and_a_handler_on_each_of_its_screens(
    scope: str, action: actions.Action
) -> None:
    screen = SCREENS[scope]
    assert hasattr(screen, f"act_{action.name}") or hasattr(ConsoleApp, f"act_{action.name}")
    ids = {getattr(b, "id", None) for b in screen.BINDINGS}
    assert action.name in ids
    assert action.tooltip
    assert action.title


def test_every_handler_is_in_the_table() -> None:
    names = {a.name for a in actions.ACTIONS}
    for owner in (ConsoleApp, *SCREENS.values()):
        handlers = {n[4:] for n in dir(owner) if n.startswith("act_")}
        assert handlers <= names, owner


def test_keys_do_not_clash_with_each_other_or_with_textual() -> None:
    assert keymap.clashes({}) == []
    taken = {
        "ctrl+c",
        "ctrl+q",
        "tab",
        "shift+tab",
        "up",
        "down",
        "pageup",
        "pagedown",
        "home",
        "end",
        "g",
        "G",
        "j",
    }
    keys = {k for a in actions.ACTIONS for k in a.keys.split(",")}
    assert not keys & taken


def test_what_changes_the_cluster_has_a_command() -> None:
    assert all(a.command for a in actions.ACTIONS if a.mutates)
    assert all(a.mutates for a in actions.ACTIONS if a.ask)
    assert len({a.name for a in actions.ACTIONS}) == len(actions.ACTIONS)


def test_the_footer_names_actions_of_its_screen_and_how_to_leave() -> None:
    for scope in actions.SCOPES:
        named = list(actions.footer(scope))
        assert all(scope in a.scope for a in named)
        assert "quit" in {a.name for a in named}


def test_every_command_of_the_table_exists_with_its_options() -> None:
    names = cli._main.list_commands(None)  # type: ignore[arg-type]
    for action in actions.ACTIONS:
        program, *words = action.command.split() or ["eccon"]
        assert program == "eccon"
        if not words:
            continue
        assert words[0] in names, action.command
        command = cli._main.get_command(None, words[0])  # type: ignore[arg-type]
        assert command is not None
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")}
        assert {w for w in words[1:] if w.startswith("-")} <= options, action.command
        takes = [p for p in command.params if isinstance(p, click.Argument)]
        given = [w for w in words[1:] if not w.startswith("-") and w != "TEXT"]
        assert len(given) <= len(takes), action.command


def test_the_document_of_keys_is_the_table() -> None:
    path = Path(eccon.__file__).parents[1] / "docs" / "keys.md"
    assert path.read_text() == manual.markdown(), "python -m eccon.console.manual > docs/keys.md"
    for action in actions.ACTIONS:
        assert f"| `{action.name}` |" in manual.markdown()


async def test_help_and_palette_name_every_action(tmp_path: Path) -> None:
    app = ConsoleApp(tmp_path / "none")
    app.state = states.busy()
    async with app.run_test(size=(120, 50)) as pilot:
        for scope in ("overview", "traces"):
            if scope == "traces":
                app.act("traces")
                await pilot.pause()
            app.act("help")
            await pilot.pause()
            screen = app.screen
            assert isinstance(screen, Help)
            assert screen.scope == scope
            drawn = (line() if callable(line) else line for _, line in screen.query_one("#keys", Rows)._rows)
            lines = ["".join(part for part, _ in line) for line in drawn]
            text = " ".join(" ".join(line[HELP_MARGIN - 1 :] for line in lines).split())
            offered = app.offered(actions.in_scope(scope))
            assert {a.name for a in actions.in_scope(scope)} - {a.name for a in offered} == OF_RECORDINGS
            for action in offered:
                assert action.tooltip in text  # whole, however it is folded
                assert any(f" {action.title} " in line for line in lines)
            await pilot.press("escape")
            await pilot.pause()
            titles = {c.title.lower() for c in app.get_system_commands(app.screen)}
            assert titles == {a.title.lower() for a in offered}


async def test_what_a_console_cannot_do_it_does_not_offer(tmp_path: Path) -> None:
    alone = ProxySource(tmp_path / "none")
    for read_only, source, there, absent in (
        (True, None, {"traces", "doctor"}, {"restart", "prompt", "faster"}),
        (False, alone, {"drain", "remove", "prompt"}, {"restart", "logs", "doctor", "hold"}),
        (True, Replay(tmp_path / "none"), {"faster", "hold", "traces"}, {"restart", "logs", "doctor"}),
    ):
        app = ConsoleApp(tmp_path / "none", read_only=read_only)
        if source is not None:
            app.link = source
        names = {a.name for a in app.offered(actions.ACTIONS)}
        assert there <= names
        assert not absent & names


def test_the_users_keys_replace_ours_and_clashes_are_said(tmp_path: Path) -> None:
    path = tmp_path / "console.toml"
    path.write_text('theme = "ansi"\n[keys]\nrestart = "f2"\nstop = "p"\nnothing = "x"\n')
    settings, problems = keymap.load(path)
    assert settings.keys == {"restart": "f2", "stop": "p"}
    assert actions.key_label(actions.by_name("restart"), settings.keys) == "f2"
    assert any("nothing" in p for p in problems)
    assert any("key p stands for prompt and stop" in p for p in problems)


@pytest.mark.parametrize("text", ["[keys", "colour = 1", "[keys]\nrestart = 3"])
def test_a_broken_settings_file_is_said_and_not_fatal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "console.toml"
    path.write_text(text)
    settings, problems = keymap.load(path)
    assert settings == keymap.Settings()
    assert len(problems) == 1
    assert str(path) in problems[0]


async def test_a_users_key_works(tmp_path: Path, own_home: Path) -> None:
    config = own_home / "config" / "eccon"
    config.mkdir(parents=True)
    (config / "console.toml").write_text('[keys]\ntraces = "f7"\n')
    app = ConsoleApp(tmp_path / "none")
    app.state = states.busy()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("t")
        await pilot.pause()
        assert isinstance(app.screen, Overview)
        await pilot.press("f7")
        await pilot.pause()
        assert isinstance(app.screen, Traces)
    assert isinstance(app, App)
