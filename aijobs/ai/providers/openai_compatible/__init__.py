"""Any server with OpenAI's chat completions API: DeepSeek, OpenAI, vLLM, Ollama, llama.cpp.

Reading order: provider (the port), client (one request), call (its stream), refusals (a server's errors), loop (where
asynchronous code runs).
"""

from aijobs.ai.providers.openai_compatible.loop import LoopThread
from aijobs.ai.providers.openai_compatible.provider import OpenAiCompatibleProvider, load_client

__all__ = ["LoopThread", "OpenAiCompatibleProvider", "load_client"]
