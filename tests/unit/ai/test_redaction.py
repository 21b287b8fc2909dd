"""What is redacted and what is kept, the marks, and idempotence."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aijobs.screening.redaction import VERSION, Redacted, redact
from aijobs.screening.secret_shapes import is_secret_name

# In two parts, so that a search for leaked keys doesn't find them here.
BEGIN, SK, GHP, AKIA = "-----BEGIN" + " ", "sk" + "-", "ghp" + "_", "AKIA" + "IOSFODNN7EXAMPLE"
PEM = f"""{BEGIN}RSA PRIVATE KEY-----
MIIEowIBAAKCAQEAu1SU1LfVLPHCozMxH2Mo
AbCdEfGh0123456789==
-----END RSA PRIVATE KEY-----"""
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"

MASKED = [
    ("write to bob@example.com.", "write to [EMAIL_1]."),
    ("Bob@Example.com is bob@example.com, not al@x.org", "[EMAIL_1] is [EMAIL_1], not [EMAIL_2]"),
    ("邮箱：li.lei+school@mail.edu.cn，谢谢", "邮箱：[EMAIL_1]，谢谢"),
    ("<a.b@c.co.uk>;d_e@f-g.de", "<[EMAIL_1]>;[EMAIL_2]"),
    ("电话13800138000。", "电话[PHONE_1]。"),
    ("138 0013 8000, +86 13800138000, 0086-138-0013-8000", "[PHONE_1], [PHONE_1], [PHONE_1]"),
    ("call +1 (415) 555-2671 or +44 20 7946 0958", "call [PHONE_1] or [PHONE_2]"),
    ("+14155552671; +4915112345678", "[PHONE_1]; [PHONE_2]"),
    ("传真 010-62345678", "传真 [PHONE_1]"),
    ("身份证号11010519491231002X", "身份证号[ID_1]"),
    ("11010519491231002x and 11010519491231002X", "[ID_1] and [ID_1]"),
    ("4111 1111 1111 1111", "[CARD_1]"),
    ("4111-1111-1111-1111 = 4111111111111111", "[CARD_1] = [CARD_1]"),
    ("Visa 4111 1111 1111 1111 12/27 123", "Visa [CARD_1] 12/27 123"),
    ("in 2024 5500 0000 0000 0004 2030", "in 2024 [CARD_1] 2030"),
    ("amex 3782 822463 10005", "amex [CARD_1]"),
    ("卡号6222021234567890128", "卡号[CARD_1]"),
    (f"my key {SK}abcdefghijklmnopqrstuvwx", "my key [KEY_1]"),
    ("sk-proj-Ab12_cd-34EfGh", "[KEY_1]"),
    (f"{GHP}abcdefghijklmnopqrstuvwxyz0123456789", "[KEY_1]"),
    (AKIA, "[KEY_1]"),
    ("密钥是sk-CANARYCANARYCANARY！", "密钥是[KEY_1]！"),
    ("send Bearer abc.DEF-123_ghi", "send Bearer [TOKEN_1]"),
    (f"token {JWT} expired", "token [TOKEN_1] expired"),
    (f"here:\n{PEM}\nthanks", "here:\n[PRIVATE_KEY_1]\nthanks"),
    (PEM.replace("\n", "\\n"), "[PRIVATE_KEY_1]"),
    (PEM[:90], "[PRIVATE_KEY_1]"),
    ("postgresql://aijobs:hunter2@db:5432/aijobs", "postgresql://[CREDENTIALS_1]@db:5432/aijobs"),
    ("redis://:s3cret@10.0.0.1/0", "redis://[CREDENTIALS_1]@10.0.0.1/0"),
    ("https://bob:pw@host.example.com/x", "https://[CREDENTIALS_1]@host.example.com/x"),
    ("password=hunter2", "password=[SECRET_1]"),
    ("DB_PASSWORD=correct", "DB_PASSWORD=[SECRET_1]"),
    ("export OPENAI_API_KEY=abcdef", "export OPENAI_API_KEY=[SECRET_1]"),
    ("https://x.org/?q=1&api_key=abcd1234&page=2", "https://x.org/?q=1&api_key=[SECRET_1]&page=2"),
    ("x-api-key: zzzz1111yyyy", "x-api-key: [SECRET_1]"),
    ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic [SECRET_1]"),
    ("Authorization: Bearer xxxx", "Authorization: Bearer [SECRET_1]"),
    ("密码：abc12345", "密码：[SECRET_1]"),
    ("我的密码是Abc12345。", "我的密码是[SECRET_1]。"),
    ("the password is hunter2!", "the password is [SECRET_1]!"),
    ('config {"password": "correct horse"} here', 'config {"password": "[SECRET_1]"} here'),
    (r"{\"apiKey\": \"abc\"} in a log", r"{\"apiKey\": \"[SECRET_1]\"} in a log"),
]
LEFT_ALONE = """
    The Treaty of Versailles was signed in 1919; it had 440 articles.
    1949 1978 2001 2008 2022
    World population: 8045311447 people, or 8 045 311 447.
    Avogadro's number is 6.02214076e23 and pi is 3.14159265358979323846.
    ISBN 978-7-5135-1234-5, ISBN 9787020002207
    2^64 = 18446744073709551616
    1234567890123456 is no card, and neither is 4111111111111112
    5 000 000 000 000 000 is five quadrillion
    The year 20240131 12:30:45, at 1706700000000 ms
    C6H12O6 + 6O2 = 6CO2 + 6H2O; Ca2+ and Fe3+
    x = +12, y = -345678901, 5 + 12345678 = 12345683
    110105194912310021 has the wrong check character
    Phone numbers in Britain have 11 digits.
    A password should be long. Password: the first line of defence.
    Passwords: what makes them strong?
    The token is the smallest unit that a tokenizer makes; token = word.
    Monkeys have keys: a monkey, a donkey, a turkey and a keyboard.
    Secret: a thing that nobody tells. The secret is out!
    if password == expected: return token
    密码学是研究编制密码和破译密码的技术科学。
    口令：稍息，立正！
    The bearer of this letter; bearer certificates; basic principles.
    The class is sk-toggle-container-wrapper, of sk-learn fame.
    An eyJ begins the text of many tokens.
    {BEGIN}PRIVATE KEY----- is the first line of such a file.
    https://example.com:8080/path?x=1@2 and ssh://git@github.com/a/b
    me @ home, a@b, @handle, user@localhost
    key_points_of_the_chapter and tok_ens are names
    公元前221年，秦始皇统一六国；人口约2000万。
    比例尺 1:50000，海拔8848.86米，面积9600000平方千米
    光速约为299792458米每秒，圆周率3.1415926535897932
    电话是贝尔在1876年发明的。
    [EMAIL_1] and [SECRET_12] are marks that are there already
""".replace("{BEGIN}", BEGIN)


def lines(table: str) -> list[str]:
    return [line.strip() for line in table.strip().splitlines()]


@pytest.mark.parametrize(("text", "expected"), MASKED)
def test_personal_data_and_secrets_are_replaced_by_marks(text: str, expected: str) -> None:
    assert redact(text).content == expected


@pytest.mark.parametrize("text", lines(LEFT_ALONE))
def test_text_that_only_looks_like_personal_data_is_kept(text: str) -> None:
    assert redact(text) == Redacted(text, {}, VERSION)


def test_secret_names_are_recognised_in_any_spelling_and_depth() -> None:
    content = {
        "API_KEY": "canary1",
        "apiKey": "canary2",
        "api-key": "canary3",
        "Authorization": "canary4",
        "a": {"b": {"c": {"d": {"password": "canary5"}}}},
        "list": [[{"clientSecret": "canary6"}]],
        "json": json.dumps({"deep": [{"Refresh-Token": "canary7"}]}),
        "twice": json.dumps({"inner": json.dumps({"passwd": "canary8"})}),
        "pair": {"name": "password", "value": "canary9"},
        "header": {"key": "X-Api-Key", "value": "canary10"},
        "credentials": {"user": "canary11", "codes": ["canary12", 12345678]},
        "密码": "canary13",
        "db_password_2": "canary14",
        "pin": {"passcode": 987654},
        "bob@canary.org": "a name is a text too",
    }
    redacted = redact(content)
    said = json.dumps(redacted.content, ensure_ascii=False)
    assert "canary" not in said
    assert "987654" not in said
    assert "12345678" not in said
    assert redacted.counts == {"email": 1, "secret": 16}


def test_names_similar_to_secret_names_keep_their_values() -> None:
    content = {
        "tokenizer": "bpe",
        "monkey": "ape",
        "keyboard": "qwerty",
        "passwordPolicy": "long",
        "next_page_token": "p2",
        "tokens": 50,
        "max_token": "100",
        "has_password": True,
        "password": None,
        "secret": "",
        "token": False,
        "name": "Password day",
        "key": "C major",
        "keys": ["a", "b"],
        "secretary": "Ann",
    }
    assert redact(content) == Redacted(content, {}, VERSION)


@pytest.mark.parametrize("name", ["x-api-key", "APIKey", "userPassword", "mypassword", "accessKeyId", "Set-Cookie"])
def test_secret_name_is_recognised(name: str) -> None:
    assert is_secret_name(name)


def test_identifiers_of_the_learning_app_are_kept() -> None:
    content = {"source": {"id": "13800138000", "title": "13800138000"}, "segments": [{"sid": "a@b.org", "text": "x"}]}
    assert redact(content).content == {
        "source": {"id": "13800138000", "title": "[PHONE_1]"},
        "segments": [{"sid": "a@b.org", "text": "x"}],
    }


def test_value_has_one_mark_in_the_whole_document_and_each_place_is_counted() -> None:
    redacted = redact({"a": ["x@y.org, z@y.org", {"b": "z@y.org"}], "c": "x@y.org 13800138000"})
    assert redacted.content == {"a": ["[EMAIL_1], [EMAIL_2]", {"b": "[EMAIL_2]"}], "c": "[EMAIL_1] [PHONE_1]"}
    assert redacted.counts == {"email": 4, "phone": 1}
    assert redacted.version == "r1"


def test_existing_marks_are_kept_and_not_reused() -> None:
    redacted = redact({"a": "new@x.org", "b": "[EMAIL_1] and [EMAIL_3]", "c": "p@q.org r@s.org"})
    assert redacted.content == {"a": "[EMAIL_2]", "b": "[EMAIL_1] and [EMAIL_3]", "c": "[EMAIL_4] [EMAIL_5]"}
    assert redact({"password": "[SECRET_1]"}) == Redacted({"password": "[SECRET_1]"}, {}, VERSION)


def test_given_content_is_not_changed_and_not_shown_in_repr() -> None:
    content = {"a": ["bob@example.com"]}
    redacted = redact(content)
    assert content == {"a": ["bob@example.com"]}
    assert "bob" not in repr(redacted)


def test_json_in_a_string_without_findings_is_kept_unchanged() -> None:
    text = '{"b" : 1.0,\n "a":[ 1e5, "x" ] }'
    assert redact(text).content == text


def test_unparsable_json_in_a_string_is_redacted_as_text() -> None:
    deep = "[" * 5000 + '{"password": "canary-value"}' + "]" * 5000
    assert "canary" not in redact(deep).content
    assert "canary" not in redact('{"password": "canary", "n": NaN, "x": 1e999}').content
    assert "canary" not in redact('{"password": "canary", ').content


def test_names_that_become_equal_lose_no_value() -> None:
    redacted = redact({"bob@x.org": 1, "BOB@x.org": 2})
    assert sorted(redacted.content.values()) == [1, 2]


ATOMS = st.sampled_from(
    [
        "password=",
        *"bob@example.com A@b.co 13800138000 +8613800138000 4111111111111111 11010519491231002X token:".split(),
        *"sk-abcdefghijklmnop Bearer eyJhbGciOiJI.eyJzdWIiOiIx.c2ln https:// u:p@h 密码：".split(),
        AKIA,
        *"[EMAIL_1] [EMAIL_2] [SECRET_1] [KEY_7] [CARD_1 _1] MIIEowIBAAKCAQEAu1SU abc123def456".split(),
        *"\" ' { } [ ] : @ . - _ 1 a 中 \\".split(" "),
        f"{BEGIN}PRIVATE KEY-----",
    ]
)
TEXTS = st.lists(st.one_of(ATOMS, st.text(max_size=3), st.just(" ")), max_size=14).map("".join)
NAMES = st.one_of(st.sampled_from(["password", "id", "sid", "name", "value", "text", "apiKey", "monkey"]), TEXTS)
DOCUMENTS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(NAMES, inner, max_size=4),
        st.dictionaries(NAMES, inner, max_size=3).map(json.dumps),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS)
def test_redacting_twice_changes_nothing(document: Any) -> None:
    once = redact(document)
    twice = redact(once.content)
    assert twice.content == once.content
    assert twice.counts == {}


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "1",
        "@",
        "a@",
        "a.",
        "1 ",
        "4111 ",
        "+1",
        "-",
        "=",
        "{",
        "[",
        "\\",
        "sk-",
        "eyJ",
        "eyJaaaaaaaaa.",
        "://",
        "x://y:",
        "password=",
        "password= ",
        "密码：",
        'token:"',
        "password is ",
        "bearer ",
        f"{BEGIN}PRIVATE KEY-----AAAAAAAAAAAAAAAAAAAA",
        "13800138000",
        "[EMAIL_1]",
        '{"password":',
    ],
)
def test_running_time_is_not_quadratic(unit: str) -> None:
    """Eight times the text may take about eight times as long, but not sixty-four times."""

    def spent(characters: int) -> float:
        text, times = unit * (characters // len(unit)), []
        for _ in range(2):
            begun = time.process_time()
            redact(text)
            times.append(time.process_time() - begun)
        return min(times)

    assert spent(120_000) < 32 * max(spent(15_000), 0.001)
