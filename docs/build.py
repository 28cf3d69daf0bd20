"""Builds the site: pages made from the README, the tutorials and the declarations, then zensical.

    python docs/build.py [--site-dir FOLDER]       default: site/
    python docs/build.py --picture                 docs/images/page.png instead, by Chromium

Nothing made here but this picture is kept in the repository. The builder takes any warning for an
error.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tables

ROOT = Path(__file__).parent.parent

#: Folders and files of the repository that have a page.
PAGES = {
    "strategies": "strategies.md",
    "layouts": "layouts.md",
    "tutorials": "tutorials/index.md",
}
#: A picture that is a page on the site, which plays, and what a command of the guide calls it.
PICTURE, LIVE = "images/page.png", "page.html"
#: The layout and the place on its clock that the picture and the site show, and the size in pixels.
SHOWN, SIZE = "#1,282", (1280, 1125)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def build(site: Path) -> int:
    """Render every page into a folder; the builder's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        ignored = shutil.ignore_patterns("*.py", "__pycache__")
        shutil.copytree(ROOT / "docs", place / "docs", ignore=ignored)
        for page in (place / "docs").rglob("*.md"):
            page.write_text(guide(page.read_text()))
        for page, content in pages().items():
            path = place / "docs" / page
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        settings = (ROOT / "mkdocs.yml").read_text()
        for name in ("src", "docs/docstrings.py"):
            settings = settings.replace(f"[{name}]", f"[{ROOT / name}]")
        (place / "mkdocs.yml").write_text(settings)
        command = ["zensical", "build", "--strict", "--clean"]
        status = subprocess.run([sys.executable, "-m", *command], cwd=place).returncode
        if status == 0:
            shutil.copytree(place / "site", site, dirs_exist_ok=True)
    return status


def pages() -> dict[str, str | bytes]:
    """The generated pages and pictures, by their paths."""
    made: dict[str, str | bytes] = {
        "index.md": home((ROOT / "README.md").read_text()),
        "strategies.md": tables.strategies(),
        "layouts.md": tables.layouts(),
    }
    notebooks = sorted((ROOT / "tutorials").glob("*.ipynb"))
    titles = {}
    for path in notebooks:
        page, pictures = rendered(json.loads(path.read_text()), path.stem)
        made[f"tutorials/{path.stem}.md"] = page
        made |= {f"tutorials/{name}": png for name, png in pictures.items()}
        titles[path.stem] = page.splitlines()[0].lstrip("# ")
    made["tutorials/index.md"] = contents(titles)
    made[LIVE] = live()
    return made


def live() -> str:
    """The page that plays layouts, by the command of `docs/planning.md` that the picture is of."""
    guide = (ROOT / "docs" / "planning.md").read_text().replace("\\\n", "")
    (command,) = re.findall(rf"^weft (explain .*--html {LIVE})$", guide, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "weft_cli", *shlex.split(command)]
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return (Path(folder) / LIVE).read_text()


def picture(path: Path) -> None:
    """The page that plays layouts as Chromium shows it, with a palette of 256 colours."""
    from PIL import Image

    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"--picture needs a browser, one of {', '.join(names)}")
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder, LIVE), Path(folder, "shot.png")
        page.write_text(live())
        size = ",".join(map(str, SIZE))
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={size}"]
        command = [browser, *options, f"--screenshot={shot}", f"{page.as_uri()}{SHOWN}"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        Image.open(shot).convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE).save(
            path, optimize=True
        )


def home(readme: str) -> str:
    """The README with links that lead to pages; what has no page keeps its words only."""

    def relink(match: re.Match) -> str:
        bang, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        path = path.removeprefix("./").rstrip("/")
        if bang:
            return f"![{text}]({path.removeprefix('docs/')})" if path.startswith("docs/") else text
        page = PAGES.get(path)
        if path.startswith("docs/") and (ROOT / path).is_file():
            page = path.removeprefix("docs/")
        if page is None and re.fullmatch(r"tutorials/\d\d_\w+\.ipynb", path):
            page = path.replace(".ipynb", ".md")
        return f"[{text}]({page}{'#' + anchor if anchor else ''})" if page else text

    return _LINK.sub(relink, readme)


def guide(page: str) -> str:
    """A page of `docs/` for the site: links lead to its pages, and the picture that plays plays."""
    page = re.sub(rf"!\[([^\]]*)\]\({PICTURE}\)", playing, page)
    page = re.sub(r"\]\(\.\./((?:\.\./)*)README\.md", r"](\1index.md", page)
    return re.sub(r"\]\(\.\./((?:\.\./)*)tutorials/(\w+)\.ipynb", r"](\1tutorials/\2.md", page)


def playing(match: re.Match) -> str:
    """The frame of the live page in place of its picture, and a link to it alone."""
    style = "width: 1280px; height: 1130px; zoom: 0.54; border: 1px solid #ccc"
    frame = f'<iframe src="{LIVE}{SHOWN}" title="{match[1]}" style="{style}"></iframe>'
    return f"{frame}\n\n[The page by itself]({LIVE})"


def contents(titles: dict[str, str]) -> str:
    """The list of tutorials."""
    lines = [f"- [{title}]({stem}.md)" for stem, title in titles.items()]
    intro = (
        "Notebooks that run on a laptop, each in about a minute. In most of them the ranks of a "
        "mesh are threads of one process. They are in `tutorials/`, with their outputs."
    )
    return "\n".join(["# Tutorials", "", intro, "", *lines, ""])


def rendered(notebook: dict, stem: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\]\((\d\d_\w+)\.ipynb", r"](\1.md", source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![]({name})")
            else:
                text = "".join(output.get("text", data.get("text/plain", ()))).rstrip()
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n", pictures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--site-dir", type=Path, default=ROOT / "site")
    parser.add_argument("--picture", action="store_true", help=f"write docs/{PICTURE} instead")
    options = parser.parse_args()
    sys.exit(picture(ROOT / "docs" / PICTURE) if options.picture else build(options.site_dir))
