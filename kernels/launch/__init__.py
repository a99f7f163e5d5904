"""Code that all launches share: request, result, heads, operands, launch cache, workspace.

May import: shard, device, checks, noise, configs.
"""
