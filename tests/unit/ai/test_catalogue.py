"""The providers file: defaults without one, and errors that stop the start."""

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


def test_built_in_provider_is_the_default_without_a_key() -> None:
    catalogue = Catalogue.load(None, {})
    assert catalogue.routes[DEFAULT] == (LOCAL,)
    assert not catalogue.providers["deepseek"].ready


def test_deepseek_needs_only_a_key() -> None:
    catalogue = Catalogue.load(None, {"deepseek": KEY})
    assert catalogue.routes[DEFAULT] == (Route("deepseek", "deepseek-flash"),)
    assert catalogue.providers["deepseek"].extra_body == {"thinking": {"type": "disabled"}}
    assert KEY not in repr(catalogue)


def test_route_of_users_keys_does_not_depend_on_the_platforms_route(tmp_path: Path) -> None:
    catalogue = load(tmp_path, ACME + '[routes]\ndefault = ["acme/m1"]\n', acme=KEY)
    assert catalogue.user_routes == {"user_deepseek_key": (Route("deepseek", "deepseek-flash"),)}


def test_route_keeps_the_order_of_the_file(tmp_path: Path) -> None:
    steps = '["acme/m2", "deepseek/deepseek-flash", "local/local-extractive-v1"]'
    catalogue = load(tmp_path, f"{ACME}[routes]\ndefault = {steps}\n", acme=KEY, deepseek=KEY)
    assert catalogue.routes[DEFAULT] == (Route("acme", "m2"), Route("deepseek", "deepseek-flash"), LOCAL)
    assert catalogue.providers["acme"].base_url == "https://acme.example/v1"


def test_file_may_override_a_built_in_provider(tmp_path: Path) -> None:
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
def test_invalid_providers_file_stops_the_start_and_names_the_error(
    tmp_path: Path, text: str, keys: dict[str, str], said: str
) -> None:
    assert said in refused(tmp_path, text, **keys)


def test_missing_providers_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="AIJOBS_PROVIDERS: there is no file"):
        Catalogue.load(tmp_path / "gone.toml", {})
