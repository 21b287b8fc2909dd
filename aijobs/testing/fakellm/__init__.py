"""A provider for tests: a real HTTP server with OpenAI's chat completions, working or faulty.

    with FakeLlm() as llm:
        llm.script(faults.too_many_requests(retry_after_s=2), Answer())
        ...                                  # whatever calls llm.url + "/v1"
        assert [call.status for call in llm.calls] == [429, 200]

Reading order: faults (the list), steps and answer (how a call is answered), exchange (the wire), good (good answers),
ledger (the log), script (which step for which call), server.
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
