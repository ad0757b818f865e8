"""The documentation site: `make docs` builds it, with warnings as errors."""

import sys
from pathlib import Path

from prefed import __version__

sys.path.insert(0, str(Path(__file__).parent))
import cards
import reference

project = "prefed"
author = "The prefed developers"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx.ext.githubpages"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "results"]
nitpicky = False

html_theme = "furo"
html_title = "prefed"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "model_config, model_post_init"}


def _commands() -> str:
    """Every command with its help and options, from the command line itself."""
    import click
    from typer.main import get_command

    from prefed.cli import app

    def page(name: str, command: click.Command, depth: int) -> list[str]:
        lines = [f"{'#' * depth} {name}", "", (command.help or "").strip(), ""]
        children = getattr(command, "commands", None)
        if children:
            for child, inner in children.items():
                lines += page(f"{name} {child}", inner, depth + 1)
            return lines
        rows = []
        for parameter in command.params:
            if parameter.name == "help":
                continue
            flags = ", ".join(f"`{flag}`" for flag in parameter.opts)
            if parameter.param_type_name == "argument":
                flags = f"`{parameter.human_readable_name}`".replace("|", "\\|")
            rows.append(f"| {flags} | {(getattr(parameter, 'help', None) or '').strip()} |")
        return [*lines, "| | |", "|---|---|", *rows, ""] if rows else lines

    top = get_command(app)
    return "\n".join(
        line
        for n, c in top.commands.items()
        for line in page(f"prefed {n}", c, 2)  # type: ignore[attr-defined]
    )


myst_enable_extensions.append("substitution")
myst_substitutions = {
    "commands": _commands(),
    "configuration": reference.page(),
    "cards": cards.page(),
}
