"""Rules for Chinese: what a sentence defines, names, counts or locates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from aijobs.learning.rules.facts import ACRONYM, DEFINITION, NAME, NUMBER, QUESTION, TERM, Fact
from aijobs.learning.rules.segmenter import Segmenter, Word
from aijobs.learning.rules.text import Sentence

_GENERIC_LABELS = frozenset(
    """
    注意 例如 例 举例 例子 备注 作业 重点 难点 要点 总结 小结 来源 日期 答 问
    问题 回答 答案 公式 反应式 方程式 图 表 提示 思考 时间 地点 关键词 参考 目标
    定义 概念 标题 作者 说明 结论 实验 步骤 结果 原因 意义 特点 复习 记住 另外
    其中 包括 如下 即 注 笔记 课题 老师 姓名 班级 补充 知识点 考点 易错点 口诀
    """.split()
)
_PAIR = re.compile(r"(?P<term>[^：:。，；！？=—]{1,24}?)\s*(?:[：:](?!//)|——|—|\s[-–]\s)\s*(?P<rest>\S.*)")
_LEAD = re.compile(r"(?:在[^，。]{2,16}[中里内上]|在[^，。]{1,10}学上)，")
_FILLER = re.compile(
    r"^(?:一般来说|通常来说|简单地说|简单来说|总的来说|此外|另外|所谓|同时|不过|然而|当然|其实|事实上)，?"
)
_ASIDE = re.compile(r"，?(?:又|也|简)(?:称|叫|名|叫做|称为)[^，。（]{1,12}，|（[^）]{1,24}）|\([^()]{1,24}\)")
_TO_BE = ("指的是", "是指", "就是", "是")
_KIND_OF = re.compile(
    r"(?:指|由|一[种类个项条门段座部本位名只片块次场组套层道对股支]|最|世界|中国|我国|地球|人体|植物|动物|生物|细胞)|[^，。；]{1,40}的[^，。；]"
)
_CALLED = re.compile(
    r"^(?:(?:[^。；]{4,80}，)?(?:我们|人们|科学家|通常|一般)?(?:把|将)(?P<held>[^，。；]{3,50}?)|(?P<subject>[^，。；：]{4,50}?)(?:被|通常|一般|也)*)"
    r"(?:叫做|叫作|称为|称作|称之为|命名为)(?P<term>[^，。；、（）的是]{2,14})(?P<rest>[，；（].*)?。?$"
)
_PARTS = re.compile(
    r"^(?P<subject>[^，。；：]{2,20}?)(?:的?(?:整个)?过程)?(?:可以|可|通常|一般|主要|大致)*(?:分为|分成|包括|包含)"
    r"(?P<rest>[^，。；]{3,50}?)(?:这)?(?P<count>[两二三四五六七八九十])(?P<what>(?:大)?[个种类大部层]{1,2}[^，。；的]{0,6})。?$"
)
_MADE_OF = re.compile(
    r"^(?P<subject>[^，。；：]{2,16}?)(?:主要|都|通常)*由(?P<rest>[^，。；]{3,50}?)(?P<verb>组成|构成)的?。?$"
)
_WHERE = re.compile(
    r"^(?P<subject>[^，。；：]{2,16}?)(?:主要|通常|一般|都)*(?:(?P<after>发生|进行|分布|存在|位于)在?(?P<place>[^，。；]{3,30})"
    r"|(?:是)?在(?P<inside>[^，。；]{2,30}?(?:上|中|里|内|处))(?P<before>进行|发生|完成)的?)(?:[，；].*)?。?$"
)
_CREDIT = re.compile(
    r"^(?P<lead>(?:公元前|公元)?\d{1,4}年，)?(?P<who>[^，。；：]{2,24}?)(?:首先|最早|第一个|首次|于(?P<year>\d{3,4}年)|在(?P<in>\d{3,4}年))*"
    r"(?P<verb>发现|发明|提出|证明|证实|创立|创作|撰写|写出|探明|测定|创造|统一|建立)(?P<did>了)?(?P<what>[^。；]{2,60}?)。?$"
)
_PERSON_AT_END = re.compile(
    r"(?:[^国皇]家|[^器]人|学者|皇帝|国王|将军|之父|医生|教授|总统|领袖|人物|统治者|君主)(?:之一)?$"
)
_BY_TRADE = re.compile(
    r"(?:家|医生|学者|诗人|作家|皇帝|国王|博士|教授|物理学者)(?P<name>[\u4e00-\u9fff·]{2,14}?)(?=首先|最早|首次|发现|发明|提出|证明|证实|用|通过|在|于"
    r"|做|进行|指出|认为|观察|测|探明|把|将|和|与|、|，|的|是|为|等|获|创|撰|写|（|开始|利用|设计|建立|统一)"
)
_TITLED = re.compile(r"《(?P<name>[^《》]{1,20})》")
_UNITS = (
    "%|％|‰|℃|°C|摄氏度|万亿|亿|万|平方千米|平方公里|平方米|立方米|千米|公里|厘米|毫米|微米|纳米|米|千克|公斤|毫克|克|吨|毫升|升|"
    "世纪|年代|年|个月|月|日|小时|分钟|秒|天|岁|人|倍|个|种|次|条|座|节|层|对|颗|度|千焦|焦耳|焦|瓦|伏|安|千帕|帕|摩尔|赫兹|分子|块|类|枚|根"
)
_DIGITS = r"\d+(?:[,，]\d{3})*(?:\.\d+)?"
_NUMBER = re.compile(
    rf"(?<![\dA-Za-z.,第图表式₀-₉+=×])(?:公元前|公元)?{_DIGITS}\s?(?:(?:{_UNITS})\s?)*(?:[~～至到—–-]\s?{_DIGITS}\s?(?:(?:{_UNITS})\s?)*)?"
    r"(?!\d|[A-Za-z₀-₉])"
)
_ACRONYM = re.compile(
    r"(?P<long>[\u4e00-\u9fff]{3,16})[（(](?:简称|英文缩写为?|缩写为?)?\s*(?P<short>[A-Z][A-Za-z]{0,4}[A-Z])[）)]"
)
_EXPLAINED = re.compile(r"(?P<short>[A-Z][A-Za-z]{0,4}[A-Z])[（(](?:即|全称)?(?P<long>[\u4e00-\u9fff]{3,16})[）)]")
_POINTING = re.compile(
    r"这|上述|前者|后者|如下|下面|下列|上图|下图|该|我们|你|咱|老师|同学|请|本(?:章|节|课|文|题)|因此|所以|于是|由此|例如|比如"
)
_NOT_FIRST = re.compile(
    r"^(?:它|其|他|她|这|那|此|该|但|而|却|并|还|也|又|再|则|因|所以|于是|例如|比如|如果|虽然|即使|后来|随后|接着|然后|最后|首先|其次|第[一二三四]"
    r"|不仅|不但|只有|只要|无论|除了|另一|另外|一方面|为了|当|从而|以及|和|与|或|可见|总之|之后|由于|有的|有些|许多|大多|每|各|某|什么|怎|为什么|记住|注意)"
)
_NOT_LAST = re.compile(r"[的了和与或在是有不就都也很而把被将可会能为从向对以其]$")
_PRONOUN = re.compile(r"它|他们|她|(?<!其)他(?!们)|其(?!他|中|实|余)")
_MARKUP = re.compile(r"<\w|\{\{|\}\}|::|https?:|www\.|[？?]")
_SAYS_LITTLE = re.compile(
    r"有[着]?[两二三四五几多][个种类大方][^，。：]{0,8}。$|(?:很|非常|十分|最)?重要(?:的[^，。]{1,4})?。$"
)
_NOT_A_TERM = frozenset(
    """
    原因 结果 特点 作用 意义 过程 方法 条件 内容 重点 关键 问题 目的 人们 大家
    第一步 区别 主要原因 其实质 实质 本质 前提
    """.split()
)


class ChineseRules:
    """Facts of Chinese sentences."""

    def __init__(self, cache_dir: Path) -> None:
        self._segmenter = Segmenter(cache_dir)

    # -- what a sentence says outright
    # -------------------------------------------------------------------------

    def statements(self, sentence: Sentence) -> Iterator[Fact]:
        """Yield what `sentence` defines or answers by itself, best first."""
        text = sentence.text
        if _MARKUP.search(text):
            return
        yield from self._acronyms(sentence)
        if (pair := self._pair(sentence)) is not None:
            yield pair
            return
        text = _FILLER.sub("", _after_label(text))
        for rule in (self._called, self._parts, self._copula, self._where, self._made_of, self._credit):
            if (fact := rule(sentence, text)) is not None:
                yield fact
                return

    def _pair(self, sentence: Sentence) -> Fact | None:
        match = _PAIR.fullmatch(sentence.text)
        if match is None or match["term"] in _GENERIC_LABELS or len(match["rest"].rstrip("。")) < 4:
            return None
        term, rest = match["term"].strip(), match["rest"]
        if not self._is_term(re.sub(r"[（(].*[）)]$", "", term), shortest=1) or re.search(r"[是有为]", term[1:]):
            return None
        if re.search(r"\d$", term) and re.match(r"\d", rest):
            return None
        return self._what_is(sentence, term, re.sub(r"^(?:是指|指的是|指|是)", "", rest), formal=True)

    def _copula(self, sentence: Sentence, text: str) -> Fact | None:
        lead_match = _LEAD.match(text)
        lead = lead_match.group() if lead_match else ""
        body = text[len(lead) :]
        without_aside = _ASIDE.sub(lambda aside: "\uffff" * len(aside.group()), body, count=1)
        split = self._at_to_be(without_aside)
        if split is None:
            return None
        at, verb = split
        term = (
            body[:at].replace("，", "")
            if "\uffff" not in without_aside[:at]
            else without_aside[:at].replace("\uffff", "")
        )
        term, rest = term.strip("，"), body[at + len(verb) :]
        if not self._is_term(term) or len(rest.rstrip("。")) < 2:
            return None
        definite = verb != "是"
        is_cleft = rest.rstrip("。").endswith("的")
        if is_cleft or (definite and len(rest) < 5) or (not definite and not self._describes(term, rest)):
            return None
        return self._what_is(sentence, term, rest, lead=lead, formal=definite or bool(re.match("一[种类]", rest)))

    def _at_to_be(self, text: str) -> tuple[int, str] | None:
        """Return the place of the first verb "to be" that is a word by itself (not in 但是, 总是, …), and the verb."""
        words = self._segmenter.words(text)
        for index, word in enumerate(words):
            if word.text in "，。；：":
                following = words[index + 1].text if index + 1 < len(words) else ""
                if following not in _TO_BE:
                    return None
            for verb in _TO_BE:
                if text.startswith(verb, word.start) and word.text in (verb, verb[0], verb[:2], "是"):
                    before = text[max(0, word.start - 1) : word.start]
                    return (
                        None if before in ("不", "也", "都", "还", "正", "只", "便", "才", "既") else (word.start, verb)
                    )
        return None

    @staticmethod
    def _describes(term: str, rest: str) -> bool:
        plain = rest.rstrip("。")
        if "的" in term:
            return len(plain) <= 40
        return (
            bool(_KIND_OF.match(rest))
            and len(plain) >= 5
            and not re.match(r"(?:在|从|因为|由于|为了|通过|否|不)", rest)
        )

    def _what_is(self, sentence: Sentence, term: str, rest: str, lead: str = "", formal: bool = False) -> Fact:
        # 《…》 around a title, or a person's trade at the end of the first clause, shows what kind of thing it is.
        first_clause = re.split(r"[，。；]", rest)[0]
        if _PERSON_AT_END.search(first_clause) and "的" not in term and not _PERSON_AT_END.search(term):
            question = f"{term}是谁？"
        elif re.match(r"(?:约|大约|大概)?\d", rest) and "的" in term:
            question = f"{term}是多少？"
        elif formal and "的" not in term and not lead:
            question = f"什么是{term}？"
        else:
            question = f"{lead}{term}是什么？"
        return Fact(
            DEFINITION,
            "zh",
            sentence,
            question,
            rest.rstrip("。") + "。" if "，" in rest else rest.rstrip("。"),
            term=_bare(term),
        )

    def _called(self, sentence: Sentence, text: str) -> Fact | None:
        match = _CALLED.match(text)
        if match is None:
            return None
        held, subject, term = match["held"], match["subject"], match["term"]
        asked = held or subject
        if _NOT_FIRST.match(asked) or _POINTING.search(asked) or _PRONOUN.search(asked) or not self._is_term(term):
            return None
        question = f"人们把{held}叫做什么？" if held else f"{subject}叫做什么？"
        return Fact(DEFINITION, "zh", sentence, question, term, term=term)

    def _parts(self, sentence: Sentence, text: str) -> Fact | None:
        match = _PARTS.match(text)
        if match is None or not self._is_term(match["subject"]) or not re.search(r"[和、与及]", match["rest"]):
            return None
        question = f"{match['subject']}分为哪{match['count']}{match['what']}？"
        return Fact(QUESTION, "zh", sentence, question, match["rest"], term=f"{match['subject']}分")

    def _made_of(self, sentence: Sentence, text: str) -> Fact | None:
        match = _MADE_OF.match(text)
        if match is None or not self._is_term(match["subject"].removesuffix("是")):
            return None
        question = f"{match['subject'].removesuffix('是')}由什么{match['verb']}？"
        return Fact(QUESTION, "zh", sentence, question, match["rest"], term=f"{match['subject']}由")

    def _where(self, sentence: Sentence, text: str) -> Fact | None:
        match = _WHERE.match(text)
        if match is None or not self._is_term(match["subject"]):
            return None
        place = match["place"] or match["inside"]
        if (
            re.search(r"\d|时|期|年|下$|过程|条件|情况|阶段", place)
            or _PRONOUN.search(place)
            or _POINTING.search(place)
        ):
            return None
        verb = match["after"] or match["before"]
        asked = (
            f"{match['subject']}{verb}在哪里？"
            if match["after"] in ("分布", "存在")
            else f"{match['subject']}在哪里{verb}？"
        )
        if verb == "位于":
            asked = f"{match['subject']}位于哪里？"
        return Fact(QUESTION, "zh", sentence, asked, place, term=f"{match['subject']}在")

    def _credit(self, sentence: Sentence, text: str) -> Fact | None:
        match = _CREDIT.match(text)
        if match is None or _POINTING.search(text) or not self._is_somebody(match["who"]):
            return None
        when = match["lead"] or ""
        year = match["year"] or match["in"]
        when = when or (f"{year}，" if year else "")
        if re.match(r"(?:其|它|他|她|在)", match["what"]):
            return None
        question = f"{when}谁{match['verb']}{match['did'] or ''}{match['what']}？"
        return Fact(QUESTION, "zh", sentence, question, match["who"], term=match["who"])

    def _is_somebody(self, who: str) -> bool:
        if _NOT_FIRST.match(who) or _PRONOUN.search(who) or re.search(r"[的过用从对]|通过|实验|研究", who):
            return False
        if re.search(r"(?:家|医生|学者|诗人|皇帝|国王|博士|教授)[\u4e00-\u9fff·]{2,14}$", who):
            return True
        words = self._segmenter.words(who)
        return all(word.flag.startswith(("nr", "ns")) and word.known for word in words)

    def _acronyms(self, sentence: Sentence) -> Iterator[Fact]:
        for match in (*_ACRONYM.finditer(sentence.text), *_EXPLAINED.finditer(sentence.text)):
            long = match["long"]
            if match.re is _ACRONYM:
                long = re.split(r"[的和与或是把叫为在由及成]|叫做|称为|产生|生成|合成|形成", long)[-1]
            if 3 <= len(long) <= 14:
                question = f"{match['short']} 的中文名称是什么？"
                yield Fact(ACRONYM, "zh", sentence, question, long, term=match["short"])

    # -- what can be hidden in a sentence
    # -----------------------------------------------------------------------

    def gaps(self, sentence: Sentence, terms: Sequence[str]) -> Iterator[Fact]:
        """Yield what can be hidden in `sentence`: one of `terms`, otherwise a number, otherwise a name; none that gives
        itself away.
        """
        text = _FILLER.sub("", sentence.text)
        if not (self._stands_alone(text) and 10 <= len(text) <= 110):
            return
        words = self._segmenter.words(text)
        bounds = {word.start for word in words} | {len(text)}
        for term in terms:
            at = text.find(term)
            if len(term) < 2 or at < 0 or _SAYS_LITTLE.search(text):
                continue
            if at in bounds and at + len(term) in bounds and len(term) * 3 <= len(text):
                yield Fact(TERM, "zh", sentence, text, gap=term, term=term)
        for match in _NUMBER.finditer(text):
            if _tells_something(match, text):
                yield Fact(NUMBER, "zh", sentence, text, gap=match.group().strip(), term=match.group().strip())
                break
        for name in self._names(text, words):
            yield Fact(NAME, "zh", sentence, text, gap=name, term=name)
            break

    @staticmethod
    def _stands_alone(text: str) -> bool:
        if _MARKUP.search(text) or _POINTING.search(text) or _NOT_FIRST.match(text):
            return False
        if not text.endswith(("。", "！", "”", "）")) or re.match(r"[^，。]{1,8}[：:]", text):
            return False
        opening = re.split(r"[，；：]", text)[0]
        return not _PRONOUN.search(opening)

    @staticmethod
    def _names(text: str, words: Sequence[Word]) -> list[str]:
        found = [match["name"] for pattern in (_BY_TRADE, _TITLED) for match in pattern.finditer(text)]
        found += (
            re.findall(r"[\u4e00-\u9fff]{1,6}(?:·[\u4e00-\u9fff]{1,8})+(?=[^\u4e00-\u9fff])", text) if not found else []
        )
        if found:
            return found
        for index, word in enumerate(words):
            beside = [*words[index - 1 : index], *words[index + 1 : index + 2]]
            alone = all(len(other.text) > 1 or other.flag in ("x", "p", "uj", "c", "f") for other in beside)
            is_place = word.flag == "ns" and len(word.text) >= 2 and word.text not in ("中国", "世界", "地球")
            if is_place and word.known and alone:
                found.append(word.text)
        return found

    # -- words
    # ----------------------------------------------------------------------------------------------------

    def _is_term(self, term: str, shortest: int = 2) -> bool:
        if not shortest <= len(term) <= 20 or term in _NOT_A_TERM or term in _GENERIC_LABELS:
            return False
        if _NOT_FIRST.match(term) or _NOT_LAST.search(term) or _POINTING.search(term) or _PRONOUN.search(term):
            return False
        if re.search(r"[，。；：！？、]", term) or re.fullmatch(r"[\d\W]+", term):
            return False
        words = self._segmenter.words(term)
        if words[0].flag in ("r", "c", "p", "d", "m") or any(word.flag in ("r", "c", "y") for word in words):
            return words[0].flag == "m" and not re.match(r"[一两]", term)
        return not any(word.text in ("使", "让", "能", "可以", "会", "有", "没有") for word in words)


def _after_label(text: str) -> str:
    match = re.match(r"([^：:]{1,5})[：:]\s*", text)
    return text[match.end() :] if match and match[1] in _GENERIC_LABELS else text


def _tells_something(match: re.Match[str], text: str) -> bool:
    """Return whether a number is of something: with a unit, or after a word for an amount, and not part of an
    equation.
    """
    if re.search(r"[+=→×]", text[max(0, match.start() - 2) : match.end() + 2]):
        return False
    counted = bool(re.search(r"\D$", match.group().strip()))
    return counted or bool(re.search(r"(?:约|有|为|是|达|达到|到|至|于|过|近|等于)\s?$", text[: match.start()]))


def _bare(term: str) -> str:
    return re.sub(r"[（(].*[）)]$", "", term).strip("《》“”")
