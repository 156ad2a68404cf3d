"""Ops on tensors that are spread over a mesh of processes (torch.distributed.tensor.DTensor).

rule.py         what an op's spec says of its axes
placing.py      from where the operands lie to the axis that each dimension of the mesh splits: pure
tiles.py        which splits of the inputs of analog tiles are whole tiles: pure
seeds.py        the seed of each shard's noise
exchange.py     what the shards of one call ask of each other, and how a mesh answers
running.py      a call: operands moved to where the rule wants them, each shard's own call, outputs put together
arrival.py      telling torch, once there can be DTensors
analog_*.py     what the analog ops do beside calling themselves on their shard
"""
