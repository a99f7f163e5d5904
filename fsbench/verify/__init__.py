"""Checks that a sampler draws from the right distribution; `verify` runs those that apply to it.

Each check is a function of a Subject. They are used by pytest, by `fsbench verify`, and as the gate
of `fsbench run`. docs/design/exactness.md describes what each check detects, how small an error it
detects, and what no check can detect.

    check         Check, Setting, significance levels
    effort        number of draws, by tier and device
    drawing       exact inputs, and draws from them
    subject       a sampler under test, and draws that several checks use
    statistics    tests of counts, and the errors that they detect
    pathwise      comparison with the oracle's tokens; the launch that is about to be timed
    noise         Philox, the map from bits to Gumbel, the largest Gumbel of a row
    support       greedy decoding and extreme logits at sizes around those of tiles
    call          the full call: masks, biases, temperatures, seeds, samples
    scores        log-probabilities, entropies, ranks
    truncation    top-k, top-p, min-p, penalties
    invariance    inputs that must not change a token
    distribution  one row: goodness of fit, total variation, tails
    joint         independence of rows, steps, seeds and samples
    speculation   sequences with drafts, and how often drafts are accepted
    battery       which checks apply
"""

from fsbench.verify.battery import verify

__all__ = ["verify"]
