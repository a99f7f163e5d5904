"""What the launches of all public calls share: request, result, operands, scratch memory.

May import: shard, device, checks, noise, configs.
"""
