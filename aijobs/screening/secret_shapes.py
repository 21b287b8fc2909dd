"""The patterns of secrets, for the redaction of inputs and outputs and for internal messages.

Every repetition is bounded, or reads each character once, so a hostile text takes no longer than any other.
"""

from __future__ import annotations

import re
from functools import lru_cache

_SHORT_PREFIXES = r"[sr]k[-_]"
_KNOWN_PREFIXES = (
    r"sk[-_](?:live|test|proj|ant|or)[-_]|gh[pousr]_|github_pat_|glpat-|xox[abeoprs]-|hf_|npm_|pypi-|dop_v1_|ajo_"
)
API_KEY = re.compile(
    rf"(?<![A-Za-z0-9])(?:"
    rf"(?:{_KNOWN_PREFIXES})[A-Za-z0-9_-]{{8,400}}"
    # Two letters alone aren't enough: CSS classes and package names must not match.
    rf"|{_SHORT_PREFIXES}(?=[A-Za-z0-9_-]{{0,60}}[0-9A-Z]|[a-z]{{16}})[A-Za-z0-9_-]{{12,400}}"
    r"|A(?:KIA|SIA|ROA|IDA)[0-9A-Z]{16}(?![A-Za-z0-9])"
    r"|AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"
    r")"
)
KEY_MARKS = tuple("sk- sk_ rk- rk_ ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- xox hf_ npm_ pypi- dop_v1_ ajo_".split())
KEY_MARKS += ("AKIA", "ASIA", "AROA", "AIDA", "AIza")
"""Every text that `API_KEY` matches contains one of these."""
JWT = re.compile(r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{8,4000}\.[A-Za-z0-9_-]{4,4000}\.[A-Za-z0-9_-]{0,4000}")
URL_CREDENTIALS = re.compile(r"(?<=://)[^\s/@:\[\]]{0,300}:[^\s/@\[\]]{1,500}(?=@)")
"""The part between `scheme://` and the host."""
PRIVATE_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
PRIVATE_KEY_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")

_NAME_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")
_NAMES = frozenset(
    "password passwd pwd passphrase passcode secret token credential credentials authorization cookie setcookie "
    "apikey apitoken privatekey secretkey accesskey accesskeyid signingkey encryptionkey servicekey masterkey authkey "
    "sessionkey accountkey licensekey connectionstring accesstoken refreshtoken authtoken bearertoken idtoken "
    "sessiontoken clientsecret".split()
)
_ENDINGS = tuple(
    "password passwd passphrase apikey secretkey privatekey accesskey accesstoken refreshtoken clientsecret "
    "密码 口令 密钥 私钥 令牌".split()
)
_NOT_BEFORE_TOKEN = frozenset("stop end start pad eos bos unk next page sep mask max min".split())
"""Words of language models and of paging."""

_NO_NAME = frozenset('[]{}"')
"""A name with one of these is none: a mark must not turn a redacted value into a secret's name."""


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a field of this name holds a secret: `API_KEY`, `apiKey`, `x-api-key`, `db_password`, `密码`.

    False for similar names: `tokenizer`, `monkey`, `keyboard`, `password_policy`, `next_page_token`.
    """
    if len(name) > 100 or not _NO_NAME.isdisjoint(name):
        return False
    words = [word.lower() for word in _NAME_PARTS.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if not words or (words[-1] == "token" and not _NOT_BEFORE_TOKEN.isdisjoint(words[-2:-1])):
        return False
    tails = ("".join(words[-count:]) for count in (1, 2, 3))
    return words[-1].endswith(_ENDINGS) or any(tail in _NAMES for tail in tails)


def looks_random(value: str) -> bool:
    """Return whether a value looks random, as no word of a sentence does."""
    core = value.strip(".,;:!?\"'()[]，。；：！？")
    if len(core) < 6 or not core.isascii():
        return False
    letters = any(c.isalpha() for c in core)
    digits = any(c.isdigit() for c in core)
    marks = any(c in "!@#$%^&*+~=" for c in core)
    mixed = len(core) >= 8 and any(c.isupper() for c in core[1:])
    return letters and (digits or marks or mixed or (len(core) >= 20 and "-" not in core))
