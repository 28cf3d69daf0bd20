"""The conformance kit finds what is wrong, by how much, and passes what is right."""

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing import RankCall, conformance, standard_cases


def exact(call: RankCall) -> torch.Tensor:
    """weft's own attention, on the layout that the ranks are of."""
    length = (call.n, call.m)
    return weft.attention(call.q, call.k, call.v, call.layout, "tokens", call.mask, length=length)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("line", "refusing"),
    [
        ("tokens(zigzag): ring=3", ()),
        ("heads: tp=2; tokens: pass_q=2", ("one key/value head",)),
    ],
)
def test_weft_is_exact(line, refusing):
    layout = weft.Layout.parse(line)
    cases = standard_cases(layout.world_size)[:: 2 if refusing else 1]
    report = conformance(exact, layout, cases=cases)
    report.assert_exact(refusing)
    assert {f.case for f in report.findings if f.verdict == "refused"} == set(refusing)


def half_scale(call):
    scale = call.q.shape[-1] ** -0.5 * (1 + 1e-9)
    return weft.attention(
        call.q, call.k, call.v, call.layout, "tokens", call.mask, scale, (call.n, call.m)
    )


def no_key_gradient(call):
    return exact(RankCall(**{**vars(call), "k": call.k.detach(), "v": call.v}))


def half_key_gradient(call):
    k = (call.k + call.k.detach()) / 2
    return exact(RankCall(**{**vars(call), "k": k}))


def changes_queries(call):
    out = exact(call)
    call.q.data.mul_(1.5)
    return out


def ignores_masks(call):
    return exact(RankCall(**{**vars(call), "mask": weft.Full()}))


_last = {}


def remembers(call):
    """Keeps the last keys of the process for the backward pass, as a global would."""
    _last[call.rank] = call.k.detach().clone()

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, k):
            ctx.rank = call.rank
            return k.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 + (_last[ctx.rank] - call.k).abs().max())

    return exact(RankCall(**{**vars(call), "k": Keep.apply(call.k)}))


WRONG = {
    half_scale: ("equal lengths", "out", 1e-11),
    no_key_gradient: ("equal lengths", "dk", 0.1),
    half_key_gradient: ("grouped heads", "dk", 0.1),
    ignores_masks: ("fully masked rows", "out", 0.1),
    remembers: ("two calls in flight", "dk", 0.1),
}


@pytest.mark.parametrize("attend", WRONG, ids=lambda f: f.__name__)
def test_errors_are_found_where_they_are(attend):
    case, tensor, least = WRONG[attend]
    cases = [c for c in standard_cases(2) if c.name in (case, "causal")]
    report = conformance(attend, weft.Layout.parse("tokens: ring=2"), cases=cases)
    assert not report.ok
    assert report.of(case).verdict == "WRONG"
    assert report.of(case).errors[tensor] > least
    with pytest.raises(AssertionError, match=f"{case}: WRONG; .*{tensor}"):
        report.assert_exact()
    assert case in str(report)
    assert "WRONG" in report.markdown()


def test_changed_inputs_are_found():
    cases = standard_cases(2)[:1]
    report = conformance(changes_queries, weft.Layout.parse("tokens: ring=2"), cases=cases)
    assert "inputs were changed: q" in report.of("equal lengths").detail


def test_a_failure_of_one_rank_is_no_refusal():
    def raises(call):
        if call.rank == 1:
            raise ValueError("only here")
        return exact(call)

    report = conformance(raises, weft.Layout.parse("tokens: ring=2"), cases=standard_cases(2)[:1])
    assert report.findings[0].verdict == "FAILED"
    assert "only here" in report.findings[0].detail


def gathers(call: RankCall) -> torch.Tensor:
    """Keys gathered without a gradient; all refuse another number of keys."""
    if call.n != call.m:
        raise NotImplementedError("as many keys as queries, please")
    whole = []
    for t in (call.k, call.v):
        parts = [torch.empty_like(t) for _ in range(call.ranks)]
        dist.all_gather(parts, t.detach().contiguous())
        parts[call.rank] = t
        whole.append(torch.cat(parts, 2))
    return torch.nn.functional.scaled_dot_product_attention(call.q, *whole)


@pytest.mark.sample
@pytest.mark.sample
def test_processes_are_judged_likewise():
    names = ("equal lengths", "more keys than queries", "any strides")
    cases = [c for c in standard_cases(2) if c.name in names]
    report = conformance(gathers, 2, cases=cases, timeout=60)
    found = {f.case: f for f in report.findings}
    assert found["equal lengths"].verdict == "WRONG"
    assert found["equal lengths"].errors["out"] < 1e-11 < 0.1 < found["equal lengths"].errors["dk"]
    assert found["more keys than queries"].verdict == "refused"
    assert found["any strides"].verdict == "WRONG"
    assert not report.ok
