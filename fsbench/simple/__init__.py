"""SIMPLE, "the decision plane": CPU sampling in parallel to the GPU (arXiv 2512.00719).

    native      the C++ core: load it, its functions
    ring        memory that the producer of logits and the samplers share
    plane       persistent samplers over a ring: rows in, tokens out
    reference   the same decisions in plain torch, without the core: the oracle
    zipf        a seeded model of text: rows of logits and token traces
    hot         which tokens are hot, and the share of the probability that they cover
    sizing      cost of a scan, expected cost of a decision, the best number of hot tokens
    steps       the designs of the paper's ablation, on logits in memory
    pipeline    the steady state of pipelines with three places for sampling

docs/guide/cpu-sampling.md is the guide.
"""
