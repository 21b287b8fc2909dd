"""Word lists of the English rules."""

from __future__ import annotations

import re

GENERIC_LABELS = frozenset(
    """note notes example examples homework important remember source sources date page chapter summary
    definition definitions tip tips warning question questions answer answers q a step equation formula
    reaction figure table author url link topic title lesson class unit reminder hint exam task aim aims
    objective objectives conclusion introduction overview contents keyword keywords vocabulary reference
    references key fact facts result results also including e.g i.e time name subject teacher recap todo
    evidence method diagram word words following these are follows""".split()
)
NO_SUBJECT_START = frozenset(
    """it this that these those they there he she we you i here what which who whose how why when where while
    if as because although though since unless until after before once so then thus therefore hence however
    but and or nor yet such one each both some many most all another other others few several either neither
    none nothing something everything anything any no not its their his her our your my in on at by for from
    with without during to of into despite unlike like first firstly second secondly third finally next later
    also today now only even just perhaps overall instead sometimes often usually""".split()
)
NO_SUBJECT_END = frozenset(
    """that which who whose and or of the a an it this these they to in on at by for with from as is are also
    not""".split()
)
NO_SUBJECT_INSIDE = frozenset(
    """that which who whom whose when where if because has have had can could will would does do did may might
    must should it they he she this these there is are was were""".split()
)
NO_DEFINITION = (
    "the same", "the reason", "the case", "the one", "the first", "the second", "the third", "the next",
    "the last", "the only", "the more", "the less", "the following", "the result of this", "a lot", "a bit",
    "a little", "a few", "a good", "a great", "a very", "a key", "a big", "a major", "an essential",
    "an important", "an example",
    "an interesting", "a common", "the most important", "a huge", "a long", "a problem", "a difficult",
    "what ", "when ", "where ", "how ",
)  # fmt: skip
VAGUE_HEADS = re.compile(
    r"(?:(?:first|second|third|fourth|fifth|next|last|final|other|same|main|whole|new|most|important|"
    r"overall|key|chemical|"
    r"big|biggest|two|three|four|only|best|basic|famous|great|entire|early|late) )*"
    r"(?:first|second|third|next|last|final|reason|example|purpose|problem|answer|idea|point|difference|"
    r"stage|step|part|"
    r"thing|result|author|goal|aim|process|event|experiment|effect|cause|reaction|product|key|way|method|"
    r"theory|"
    r"importance|latter|former|rest|most|name|men|women|book|work|war|battle|city|country|river|change|"
    r"movement)s?"
)
FIXED_HEADS = frozenset(
    """capital product products function functions purpose role name symbol formula unit boiling\u00a0point
    melting\u00a0point author cause causes source sources site aim result father value speed currency equation
    ingredients product chemical\u00a0symbol chemical\u00a0formula raw\u00a0materials si\u00a0unit definition
    end\u00a0product end\u00a0products waste\u00a0product language population area length width height date
    founder inventor discoverer""".replace("\u00a0", "_").split()
)
FIXED_HEADS = frozenset(head.replace("_", " ") for head in FIXED_HEADS)
PEOPLE = (
    "scientist|chemist|physicist|biologist|botanist|physician|doctor|mathematician|engineer|inventor|"
    "astronomer|"
    "philosopher|writer|poet|author|novelist|playwright|painter|artist|sculptor|composer|musician|"
    "architect|king|queen|"
    "emperor|empress|president|minister|general|leader|explorer|historian|economist|geologist|priest|monk|"
    "nurse|"
    "politician|activist|lawyer|soldier|teacher|professor|naturalist|clergyman|merchant|ruler|prince|"
    "princess|who|man|woman"
)
VERBS_OF_CREDIT = (
    "discovered|invented|proposed|founded|wrote|published|developed|introduced|built|designed|formulated|"
    "coined|"
    "showed that|demonstrated that|proved that|observed that|suggested that|concluded that|found that|"
    "painted|"
    "composed"
)
LIKE_NAMES = frozenset(
    """january february march april may june july august september october november december monday tuesday
    wednesday thursday friday saturday sunday english french german dutch american british european greek
    roman latin swiss chinese japanese spanish italian russian i spring summer autumn winter the earth sun
    moon""".split()
)
SINGULAR_S = frozenset(
    """gas lens glass atlas bias chaos cosmos pancreas diabetes rabies species series canvas christmas texas
    kansas measles mumps news means process mass class grass""".split()
)
UNITS = (
    "km/s|m/s|km/h|g/cm3|mol/l|%|percent|per cent|°C|°F|degrees(?: Celsius| Fahrenheit)?|K|nm|µm|μm|mm|cm|"
    "m|km|nanomet(?:re|er)s?|"
    "micromet(?:re|er)s?|millimet(?:re|er)s?|centimet(?:re|er)s?|met(?:re|er)s?|kilomet(?:re|er)s?|miles?|"
    "feet|inches|mg|g|kg|grams?|kilograms?|"
    "tonnes?|tons?|ml|mL|l|L|lit(?:re|er)s?|millilit(?:re|er)s?|seconds?|minutes?|hours?|days?|weeks?|"
    "months?|years?|"
    "centuries|BC|BCE|AD|CE|Hz|kHz|MHz|J|kJ|joules?|kilojoules?|N|newtons?|W|watts?|kW|V|volts?|A|amps?|"
    "Pa|kPa|"
    "million(?: years)?|billion(?: years)?|thousand|trillion|times|people|species|molecules?|atoms?|"
    "electrons?|"
    "protons?|neutrons?|bones?|chromosomes?|pairs?(?: of \\w+)?|chambers?|layers?|members?|states?|"
    "countries|planets?|square kilomet(?:re|er)s"
)
OPENERS = re.compile(
    r"^(?:However|Moreover|Furthermore|In addition|Additionally|Also|Finally|In fact|Interestingly|Indeed|"
    r"Of course|Importantly|In other words|Overall|In general|Generally|Usually|Similarly|Likewise|"
    r"Meanwhile), "
)
POINTING = re.compile(
    r"\b(?:this|these|those|the former|the latter|above|below|following|previous|aforementioned|such an?|"
    r"for this|as a result|therefore|thus|hence|the same|do so|does so|doing so|for example|for instance|"
    r"i\.e|e\.g)\b",
    re.IGNORECASE,
)
