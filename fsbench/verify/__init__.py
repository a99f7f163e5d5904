"""Does a sampler draw what it should? `verify` runs every check that applies to a provider.

docs/design/exactness.md says what each check sees, how sharply, and what none can see. Every check
is a plain function; used by pytest, by `fsbench verify`, and as the gate of `fsbench run`:

    check         Check, Setting, and the levels of error
    effort        how many draws, by tier and device
    drawing       exact inputs, and draws from them
    subject       a sampler under test, and draws that checks share
    statistics    tests of counts, with what they detect
    pathwise      the oracle's tokens; the launch that is about to be timed
    noise         Philox, the map to Gumbel, the largest Gumbel
    support       edges: sizes, extreme logits, filters, greedy decoding
    truncation    what the filters of truncated problems keep
    invariance    what a token must not depend on
    distribution  one row: fit, total variation, tails
    joint         rows, steps, seeds and samples together
    speculation   sequences with drafts, and how often these are accepted
    battery       which of these apply
"""

from fsbench.verify.battery import verify

__all__ = ["verify"]
