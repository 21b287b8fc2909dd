"""A provider to test against: a real HTTP server that speaks OpenAI's chat completions, well or badly.

    with FakeLlm() as llm:
        llm.script(faults.too_many_requests(retry_after_s=2), Answer())
        ...                                  # whatever calls llm.url + "/v1"
        assert [call.status for call in llm.calls] == [429, 200]

Reading order: faults (what there is), steps and answer (how it is played), exchange (the wire), good (what a good
answer is made from), ledger (the log), script (which step is whose), server.
"""

from aijobs.testing.fakellm import faults
from aijobs.testing.fakellm.answer import Answer, Step
from aijobs.testing.fakellm.ledger import Call
from aijobs.testing.fakellm.server import MODEL, FakeLlm
from aijobs.testing.fakellm.steps import Break, Drip, Hang, KeepAlive, Reply, Unless, Vanish

__all__ = [
    "MODEL",
    "Answer",
    "Break",
    "Call",
    "Drip",
    "FakeLlm",
    "Hang",
    "KeepAlive",
    "Reply",
    "Step",
    "Unless",
    "Vanish",
    "faults",
]
