"""The browser of the journeys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def test_browser_renders_a_page_and_runs_its_script(page: Page) -> None:
    page.set_content("<h1>卡片</h1><script>document.title = 'ran'</script>")
    assert page.inner_text("h1") == "卡片"
    assert page.title() == "ran"


def test_page_without_javascript_runs_none(new_page: Callable[..., Page]) -> None:
    page = new_page(java_script_enabled=False)
    page.set_content("<title>still</title><script>document.title = 'ran'</script>")
    assert page.title() == "still"
