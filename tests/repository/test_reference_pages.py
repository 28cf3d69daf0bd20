"""The reference pages say every key of every kind of file, as the schemas have it today."""

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("reference_pages", DOCS / "reference.py")
reference = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = reference
spec.loader.exec_module(reference)

SCHEMAS = [schema for _, _, tables in reference.PAGES.values() for schema in tables.values()]


def test_pages_are_current():
    kept = {path.name: path.read_text() for path in (DOCS / "reference").glob("*.md")}
    assert kept == reference.pages(), "run: python docs/reference.py"


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: s.__name__)
def test_every_key_has_a_meaning(schema):
    wanted = {n for n in schema.model_fields if (schema, n) not in reference.HIDDEN}
    assert wanted <= set(reference.meanings(schema))


def test_every_page_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for name in reference.pages():
        assert f"reference/{name}" in navigation
