"""The record's findings, in sentences. Each names case, policy and numbers, and is left out when
its data are missing. Sentences are markup: what comes from the record is escaped when H puts it in.

findings(rec) -> [(heading, [sentence, ...])]
"""

from markupsafe import Markup

from read.record import Record
from say.bounds import bound_sentences, unjudged_sentences
from say.chain import chain_sentences
from say.failures import failures
from say.ranks import rank_sentences

CHAIN, RANKS = "The M chain alone", "Split over ranks"


def findings(rec: Record) -> list[tuple[str, list[Markup]]]:
    groups = [
        ("Failures", failures(rec)),
        (CHAIN, chain_sentences(rec)),
        (RANKS, rank_sentences(rec)),
        ("How near to the bounds", bound_sentences(rec)),
        ("Skipped and unjudged", unjudged_sentences(rec)),
    ]
    return [(heading, said) for heading, said in groups if said]
