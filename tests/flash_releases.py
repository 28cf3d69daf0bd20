"""Signatures of the flash-attn packages' functions, as their releases have them.

`flash_releases.json` was parsed from their sources, none of which is here or is imported. To make
it again, with a clone of github.com/Dao-AILab/flash-attention and a wheel of flash-attn-4:

    python tests/flash_releases.py CLONE flash_attn_4-4.0.0b36-py3-none-any.whl
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import zipfile
from pathlib import Path

PAGE = Path(__file__).with_suffix(".json")
_TWO = ("_flash_attn_forward", "_flash_attn_backward")
_PACKED = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
_FOUR = ("_flash_attn_fwd", "_flash_attn_bwd", "_tile_size_bwd_sm90")
#: release -> where its interface is in the clone, and the functions that weft looks at
IN_CLONE = {
    "2.6.3": ("v2.6.3", "flash_attn/flash_attn_interface.py", (*_TWO, *_PACKED)),
    "2.7.4": ("v2.7.4.post1", "flash_attn/flash_attn_interface.py", (*_TWO, *_PACKED)),
    "2.8.3": ("v2.8.3.post1", "flash_attn/flash_attn_interface.py", (*_TWO, *_PACKED)),
    "3 of 2.8.3": ("v2.8.3.post1", "hopper/flash_attn_interface.py", _TWO),
    "3 of August 2026": ("0251105a", "hopper/flash_attn_interface.py", _TWO),
}
IN_WHEEL = "flash_attn/cute/interface.py"


def signatures() -> dict[str, dict[str, inspect.Signature]]:
    """Release -> function -> its signature; a default that is no literal is its source."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def parameter(name: str, *default: str) -> inspect.Parameter:
        if not default:
            return inspect.Parameter(name, kind)
        try:
            return inspect.Parameter(name, kind, default=ast.literal_eval(default[0]))
        except ValueError:
            return inspect.Parameter(name, kind, default=default[0])

    return {
        release: {
            name: inspect.Signature([parameter(*given) for given in parameters])
            for name, parameters in functions.items()
        }
        for release, functions in json.loads(PAGE.read_text()).items()
    }


def parse(source: str, names: tuple[str, ...]) -> dict[str, list[list[str]]]:
    """The parameters of functions in a source: each its name, and its default if it has one."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            arguments, defaults = node.args.args, node.args.defaults
            bare = len(arguments) - len(defaults)
            assert not any((node.args.kwonlyargs, node.args.vararg, node.args.kwarg))
            found[node.name] = [[a.arg] for a in arguments[:bare]] + [
                [a.arg, ast.unparse(default)] for a, default in zip(arguments[bare:], defaults)
            ]
    return found


def main(clone: str, wheel: str) -> None:
    """Write the page from the sources."""
    page = {}
    for release, (commit, path, names) in IN_CLONE.items():
        show = ["git", "-C", clone, "show", f"{commit}:{path}"]
        page[release] = parse(subprocess.check_output(show, text=True), names)
    source = zipfile.ZipFile(wheel).read(IN_WHEEL).decode()
    page[Path(wheel).name.split("-")[1]] = parse(source, _FOUR)
    lines = [
        f'  "{release}": {{\n'
        + ",\n".join(f'    "{n}": {json.dumps(parameters)}' for n, parameters in functions.items())
        + "\n  }"
        for release, functions in page.items()
    ]
    PAGE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
