"""Where answers come from: one module or folder a kind of provider, each filling the port of
`ai.provider`.
"""
