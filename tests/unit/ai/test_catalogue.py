"""The providers file: what is there without one, and in which line a wrong one stops the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from aijobs.ai.catalogue import DEFAULT, LOCAL, Catalogue
from aijobs.ai.provider import Route
from aijobs.errors import SettingsError

KEY = "sk-secret-0123456789"
ACME = '[provider.acme]\nbase_url = "https://acme.example/v1/"\nmodels = ["m1", "m2"]\n'


def load(folder: Path, text: str, **keys: str) -> Catalogue:
    path = folder / "providers.toml"
    path.write_text(text, "utf-8")
    return Catalogue.load(path, keys)


def refused(folder: Path, text: str, **keys: str) -> str:
    with pytest.raises(SettingsError) as error:
        load(folder, text, **keys)
    line = str(error.value)
    assert "\n" not in line
    assert KEY not in line
    return line


def test_without_a_key_everything_works_by_the_built_in_provider() -> None:
    catalogue = Catalogue.load(None, {})
    assert catalogue.routes[DEFAULT] == (LOCAL,)
    assert not catalogue.providers["deepseek"].ready


def test_one_key_is_all_that_deepseek_needs() -> None:
    catalogue = Catalogue.load(None, {"deepseek": KEY})
    assert catalogue.routes[DEFAULT] == (Route("deepseek", "deepseek-flash"),)
    assert catalogue.providers["deepseek"].extra_body == {"thinking": {"type": "disabled"}}
    assert KEY not in repr(catalogue)


def test_users_keys_have_their_way_whatever_the_platform_uses(tmp_path: Path) -> None:
    catalogue = load(tmp_path, ACME + '[routes]\ndefault = ["acme/m1"]\n', acme=KEY)
    assert catalogue.user_routes == {"user_deepseek_key": (Route("deepseek", "deepseek-flash"),)}


def test_a_route_is_tried_in_the_order_of_the_file(tmp_path: Path) -> None:
    steps = '["acme/m2", "deepseek/deepseek-flash", "local/local-extractive-v1"]'
    catalogue = load(tmp_path, f"{ACME}[routes]\ndefault = {steps}\n", acme=KEY, deepseek=KEY)
    assert catalogue.routes[DEFAULT] == (Route("acme", "m2"), Route("deepseek", "deepseek-flash"), LOCAL)
    assert catalogue.providers["acme"].base_url == "https://acme.example/v1"


def test_a_file_may_say_otherwise_of_a_built_in_provider(tmp_path: Path) -> None:
    text = (
        '[provider.deepseek]\nbase_url = "https://proxy.example"\nmodels = ["deepseek-flash"]\njson_mode = "prompt"\n'
    )
    catalogue = load(tmp_path, text, deepseek=KEY)
    assert catalogue.providers["deepseek"].host == "proxy.example"
    assert catalogue.routes[DEFAULT] == (Route("deepseek", "deepseek-flash"),)


@pytest.mark.parametrize(
    ("text", "keys", "said"),
    [
        ("[provider.acme", {}, "can't be read"),
        ("[provider.acme]\n", {}, "provider.acme.base_url"),
        (ACME.replace("base_url", "base_uri"), {}, "provider.acme"),
        (ACME.replace("https://acme.example/v1/", "ftp://acme.example"), {}, "http"),
        (ACME.replace("https://acme.example/v1/", "https://u:p@acme.example"), {}, "no user"),
        (ACME.replace("https://acme.example/v1/", "https://acme.example?key=1"), {}, "query"),
        (ACME + f'api_key = "{KEY}"\n', {}, "provider.acme.api_key"),
        (ACME + 'json_mode = "yaml"\n', {}, "json_mode"),
        (ACME + "idle_s = 0\n", {}, "idle_s"),
        (ACME + "max_concurrent_calls = -1\n", {}, "max_concurrent_calls"),
        (ACME.replace("acme]", "Acme]"), {}, "'Acme'"),
        (ACME.replace("acme]", "local]"), {}, "'local'"),
        (ACME + '[routes]\ndefault = ["acme/m3"]\n', {"acme": KEY}, "'acme/m3'"),
        (ACME + '[routes]\ndefault = ["acme"]\n', {"acme": KEY}, "'acme'"),
        (ACME + "[routes]\ndefault = []\n", {"acme": KEY}, "leads nowhere"),
        (ACME + '[routes]\ndefault = ["acme/m1"]\n', {}, "AIJOBS_ACME_API_KEY"),
        (ACME + '[user_routes]\nuser_openai_key = ["acme/m1"]\n', {}, "user_openai_key"),
        ('[user_routes]\nuser_deepseek_key = ["local/local-extractive-v1"]\n', {}, "takes no user's key"),
        (ACME, {"acmee": KEY}, "AIJOBS_ACMEE_API_KEY"),
    ],
)
def test_a_file_that_is_wrong_stops_the_start_with_what_is_wrong_in_it(
    tmp_path: Path, text: str, keys: dict[str, str], said: str
) -> None:
    assert said in refused(tmp_path, text, **keys)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="AIJOBS_PROVIDERS: there is no file"):
        Catalogue.load(tmp_path / "gone.toml", {})
