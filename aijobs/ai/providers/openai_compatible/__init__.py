"""Any server that speaks OpenAI's chat completions: DeepSeek, OpenAI, vLLM, Ollama, llama.cpp.

Reading order: provider (the port), client (one request), call (what comes of it), refusals (what a server's error
means), loop (where asynchronous code runs).
"""

from aijobs.ai.providers.openai_compatible.loop import LoopThread
from aijobs.ai.providers.openai_compatible.provider import OpenAiCompatibleProvider, load_client

__all__ = ["LoopThread", "OpenAiCompatibleProvider", "load_client"]
