"""A text's cache as a message equals what PyTorch computes by the measured prototype's formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.models import cache_choice, cache_code, decoder, kv_prefix
from tests import tiny
from tests.parity.test_decoder import make_pair

torch = pytest.importorskip("torch", reason="parity needs torch: pip install -r requirements-dev.txt")
transformers = pytest.importorskip("transformers")

SAME = 1e-5  # relative to the largest, fp32: sums in another order
FITTED = 3e-4  # the same against fp64: the equations magnify the rounding of the shares a hundredfold

OPENING, AGAIN = (3, 5, 7), (11, 13)
ASKED = (17, 19, 2, 41)
LENGTHS = (13, 8, 11)
TEXT = slice(len(OPENING), len(OPENING) + LENGTHS[0])
IDS = np.random.default_rng(0).integers(20, 101, (3, 13)).astype(np.int32)
# The second row is padded on the left, the third on the right.
MASK = np.stack([np.ones(13, bool), np.arange(13) >= 5, np.arange(13) < 11])
SHARE = 0.4


class Oracle:
    """A reader in PyTorch whose keys, values and attention can be taken."""

    def __init__(self, model):
        self.model, self.weights, self.found, self.bias = model, [], {}, None
        config = model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        transformers.AttentionInterface.register("seen", self._attend)
        config._attn_implementation = "seen"
        for index, layer in enumerate(model.model.layers):
            for name in "kv":
                part = getattr(layer.self_attn, f"{name}_proj")
                part.register_forward_hook(lambda m, i, out, at=(name, index): self.found.__setitem__(at, out.detach()))
            layer.register_forward_hook(lambda m, i, out, at=("out", index): self.found.__setitem__(at, out.detach()))

    def _attend(self, module, q, k, v, mask, scaling=None, dropout=0.0, **_):
        rows, _, queries, size = q.shape
        scores = torch.einsum("bhgqd,bhkd->bhgqk", q.view(rows, self.heads, -1, queries, size), k) * scaling
        scores = scores.masked_fill(
            ~torch.ones(queries, k.shape[2], dtype=torch.bool).tril(k.shape[2] - queries), -torch.inf
        )
        if self.bias is not None:  # of the asked tokens' scores of the text's keys
            scores[..., -len(ASKED) :, TEXT] += self.bias[module.layer_idx].T[None, :, None, None]
        shares = scores.softmax(-1)
        self.weights.append(shares[0])
        out = torch.einsum("bhgqk,bhkd->bhgqd", shares, v)
        return out.reshape(rows, -1, queries, size).transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def read(self, ids):
        """Keys before rotation, values [l n k e], shares of attention [l k g n n] of the repeated text, and worth."""
        n, text, self.weights = len(ids), slice(len(OPENING), len(OPENING) + len(ids)), []
        self.model(input_ids=torch.tensor([[*OPENING, *ids, *AGAIN, *ids]]))
        k, v = (torch.stack([self.found[name, i][0, text] for i in range(self.layers)]) for name in "kv")
        k, v = (one.view(self.layers, n, self.heads, -1) for one in (k, v))
        shares = torch.stack([one[..., -n:, text] for one in self.weights])
        return k, v, shares, self._worth(v, shares)

    def _worth(self, v, shares):
        """The largest share of a key [l n k], over the query's stream behind the layer, times its value's output."""
        found = []
        for index, layer in enumerate(self.model.model.layers):
            stream = self.found["out", index][0, -v.shape[1] :].norm(dim=1)
            matrix = layer.self_attn.o_proj.weight.view(-1, self.heads, shares.shape[2], self.size)
            outputs = torch.einsum("nke,dkge->nkgd", v[index], matrix).square().sum(3).mean(2).sqrt()
            found.append((shares[index] / stream[:, None]).amax((1, 2)).T * outputs)
        return torch.stack(found)

    @torch.no_grad()
    def ask(self, ids, bias):
        """Logits at the asked tokens behind a text of which each head sees keys of its own, bias [l n k]."""
        self.bias = torch.tensor(np.asarray(bias))
        found = self.model(input_ids=torch.tensor([[*OPENING, *ids, *ASKED]])).logits[0, -len(ASKED) :]
        self.bias = None
        return found


def fitted(shares, values, kept, ridge=cache_choice.RIDGE, heard=None, around=None):
    """`fit` of the prototype, whose ridge is smaller, in fp64.

    `heard`: shares of the keys as sent, `around`: the values as sent.
    """
    shares, values = shares.double(), values.double()
    around = values if around is None else torch.tensor(np.asarray(around)).double()
    own = (shares if heard is None else torch.tensor(np.asarray(heard)).double())[:, kept]
    mass, m = shares.sum(-1, keepdim=True), len(kept)
    relative = own / mass
    gram = relative.T @ relative
    pull = 1e-2 * gram.diagonal().mean()
    gram, right, weight = gram + pull * torch.eye(m), relative.sum(0) + pull, torch.ones(m).double()
    step = 1 / torch.linalg.matrix_norm(gram, 2)
    for _ in range(200):
        weight = (weight - step * (gram @ weight - right)).clamp(0.05, 100.0)
    moved = own * weight
    moved = moved / (moved.sum(-1, keepdim=True) + 1 - mass)
    gram = moved.T @ moved
    wanted = shares @ values - moved @ around[kept]
    change = torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(m), moved.T @ wanted)
    return (around[kept] + change).numpy(), weight.log().numpy()


def principal(y, layers, width):
    """`Code` of the prototype, in fp64: mean, scale [2 l] and basis [n w]."""
    mean = y.mean(0)
    centred = (y - mean).view(len(y), 2 * layers, -1)
    size = centred.pow(2).mean(0).sum(1).sqrt() * (2 * layers) ** 0.5
    centred = (centred / size[None, :, None]).reshape(len(y), -1)
    sketch = torch.randn(centred.shape[1], width + 64, generator=torch.Generator().manual_seed(0)).double()
    sketch = torch.linalg.qr(centred @ sketch)[0]
    sketch = torch.linalg.qr(centred @ (centred.T @ sketch))[0]
    return mean, size.view(2, layers), torch.linalg.svd(sketch.T @ centred, full_matrices=False)[2][:width].T


@pytest.fixture(scope="module", params=["llama-3.1 scaled", "qwen2 biased"])
def pair(request, tmp_path_factory):
    return make_pair(request.param, tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def both(pair):
    """(config, reading by us of a batch of unequal texts, readings by PyTorch of one after the other)."""
    model, cfg, params = pair
    oracle = Oracle(model)
    theirs = [oracle.read(ids[mask].tolist()) for ids, mask in zip(IDS, MASK, strict=True)]
    given = {"again": embedded(params, AGAIN), "shared_prefix": embedded(params, OPENING), "keep_queries": True}
    x = decoder.embed(params, jnp.asarray(IDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_choice, "BLOCK", 5)  # several pieces of each text
        ours = tiny.compiled(cache_choice.read_twice, params, cfg, x, mask=jnp.asarray(MASK), **given)
    return cfg, ours, theirs


@pytest.fixture(scope="module")
def in_full(both):
    """The code that has as many numbers as a token's keys and values, and its chunks of states."""
    cfg, ours, _ = both
    y = cache_code.states(ours.text.k, ours.text.v)

    def chunks():
        return zip(y, jnp.asarray(MASK), strict=True)

    return cache_code.fit_code(chunks, (cfg.layers, cfg.kv_heads, cfg.head_dim), y.shape[2]), chunks


def embedded(params, ids):
    return decoder.SharedPrefix(decoder.embed(params, jnp.asarray([ids])), jnp.ones((1, len(ids)), bool))


def close(found, wanted, tolerance=SAME):
    wanted = np.asarray(wanted)
    assert np.shape(found) == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max(), rtol=0)


def test_keys_values_and_what_they_are_worth(both):
    _, ours, theirs = both
    for row, (k, v, shares, worth) in enumerate(theirs):
        close(ours.text.k[:, row, MASK[row]], k)
        close(ours.text.v[:, row, MASK[row]], v)
        close(ours.scores[:, row, MASK[row]], worth)
        close(ours.power[:, row, MASK[row]], shares.square().sum((2, 3)).permute(0, 2, 1))
        assert not np.asarray(ours.scores + ours.power)[:, row, ~MASK[row]].any()


def test_table_and_chosen_keys(both):
    cfg, ours, theirs = both
    scores = torch.cat([worth for *_, worth in theirs], 1).permute(1, 0, 2)  # [n l k]
    least = scores.flatten().topk(int(SHARE * scores.numel())).values[-1]
    wanted = (scores >= least).float().mean(0)
    table = cache_choice.table_of(np.asarray(ours.scores).transpose(1, 2, 0, 3)[MASK], SHARE)
    close(table, wanted)
    assert table.min() < SHARE / 2 and table.max() > 1.5 * SHARE, "a table of equal shares would prove little"
    count = cache_choice.count_kept(table, np.asarray(LENGTHS))
    kept = np.asarray(cache_choice.choose(ours.scores, jnp.asarray(MASK), jnp.asarray(count)))
    for row, (*_, each) in enumerate(theirs):
        for layer in range(cfg.layers):
            for head in range(cfg.kv_heads):
                m = max(0, round(LENGTHS[row] * wanted[layer, head].item()))
                chosen = each[layer, :, head].topk(m).indices.sort().values
                assert count[layer, row, head] == m
                np.testing.assert_array_equal(np.flatnonzero(kept[layer, row, MASK[row], head]), chosen)
    assert not kept[:, ~MASK].any()


@pytest.mark.parametrize("decoded, block, least", [(False, 256, cache_choice.LEAST_KEYS), (True, 5, 2)])
def test_fitted_values_and_biases(both, decoded, block, least, monkeypatch):
    monkeypatch.setattr(cache_choice, "LEAST_KEYS", least)
    monkeypatch.setattr(cache_choice, "BLOCK", block)
    cfg, ours, theirs = both
    # Heads of their own counts, one of them without any.
    count = 1 + np.arange(cfg.layers * 3 * cfg.kv_heads).reshape(cfg.layers, 3, -1) % 6
    count[0, 0, 1] = 0
    kept = np.asarray(cache_choice.choose(ours.scores, jnp.asarray(MASK), jnp.asarray(count.astype(np.int32))))
    seen, sent, heard = jnp.full((3, 1), len(OPENING)), ours.text[:2], None
    if decoded:
        noise = 0.3 * jax.random.normal(jax.random.key(0), (2, *ours.text.k.shape))
        sent = (ours.text.k + noise[0], ours.text.v + noise[1])
        turned = decoder.rotate_keys(cfg, ours.text._replace(k=sent[0]), seen=seen)
        q = ours.queries.q.reshape(*ours.queries.q.shape[:3], cfg.kv_heads, -1, cfg.head_dim)
        scores = jnp.einsum("lbqkge,lbske->lbkgqs", q, turned) * cfg.head_dim**-0.5
        total = ours.queries.total.reshape(q.shape[:-1]).transpose(0, 1, 3, 4, 2)
        heard = np.asarray(jnp.exp(scores - total[..., None]))
    sizes = tuple(map(tuple, kept.sum(axis=2).max(axis=1).tolist()))
    given = {"seen": seen, "sizes": sizes, "sent": sent if decoded else None}
    values, bias = tiny.compiled(cache_choice.fit, cfg, ours.queries, ours.text, jnp.asarray(kept), **given)
    assert not np.asarray(values)[~kept].any() and not np.asarray(bias)[~kept].any()
    moved = 0.0
    for row, (_, v, shares, _) in enumerate(theirs):
        for layer in range(cfg.layers):
            for head in range(cfg.kv_heads):
                at = np.flatnonzero(kept[layer, row, MASK[row], head])
                if not len(at):
                    continue
                around = sent[1][layer, row, MASK[row], head]
                own = None if heard is None else heard[layer, row, head][:, MASK[row]][..., MASK[row]]
                own = None if own is None else own.reshape(-1, LENGTHS[row])
                exact = shares[layer, head].reshape(-1, LENGTHS[row])
                wanted, weight = fitted(exact, v[layer, :, head], at, heard=own, around=around)
                close(values[layer, row, MASK[row], head][at], wanted, FITTED)
                close(bias[layer, row, MASK[row], head][at], weight, FITTED)
                moved = max(moved, np.abs(weight).max(), np.abs(wanted - np.asarray(around)[at]).max())
    assert moved > 0.1


@pytest.mark.parametrize("width", [8, 32])
def test_code_of_streamed_states(width):
    shape, count = (3, 2, 8), 2 * 3 * 2 * 8
    rng = np.random.default_rng(1)
    directions = np.linalg.qr(rng.normal(size=(count, 64)))[0]
    # A spectrum with a gap behind `width`, and a mean far from 0.
    sizes = np.where(np.arange(64) < width, 3.0, 1.0) * np.linspace(1.2, 1.0, 64)
    y = (5.0 + (rng.normal(size=(1000, 64)) * sizes) @ directions.T).astype(np.float32)
    mean, scale, basis = principal(torch.tensor(y).double(), 3, width)

    def chunks():
        for start in range(0, 1000, 300):
            part = y[start : start + 300]
            real = np.arange(300) < len(part)
            yield (
                jnp.asarray(np.concatenate([part, np.full((300 - len(part), count), 7.0, np.float32)])),
                jnp.asarray(real),
            )

    code = cache_code.fit_code(chunks, shape, width)
    close(code.mean.reshape(-1), mean)
    close(code.scale, scale)
    close(code.basis @ code.basis.T, np.eye(width))
    close(code.basis.T @ code.basis, basis @ basis.T)


def test_all_numbers_of_a_token_are_its_keys_and_values(both, in_full):
    (cfg, ours, _), (code, chunks) = both, in_full
    shape = (cfg.layers, cfg.kv_heads, cfg.head_dim)
    z = cache_code.write(code, ours.text)
    for found, wanted in zip(cache_code.read(code, z), ours.text[:2], strict=True):
        close(found, wanted)
    errors = [np.square(cache_code.read(code, z[..., :few])[1] - ours.text.v)[:, MASK].mean() for few in (2, 8, 16)]
    assert errors[0] > errors[1] > errors[2] > 0
    uneven = cache_code.fit_code(chunks, shape, 4, weights=jnp.ones((2, cfg.layers)).at[0].set(0.0))
    k, v = cache_code.read(uneven, cache_code.write(uneven, ours.text))
    even = cache_code.fit_code(chunks, shape, 4)
    other = cache_code.read(even, cache_code.write(even, ours.text))
    assert np.isfinite(k).all()
    assert np.square(v - ours.text.v)[:, MASK].mean() < np.square(other[1] - ours.text.v)[:, MASK].mean()


def answer(pair, prefix):
    """Logits at the asked tokens of the first row behind its prefix."""
    _, cfg, params = pair
    x, given = embedded(params, ASKED), {"shared_prefix": embedded(params, OPENING), "kv_prefix": prefix}
    return decoder.logits(params, tiny.compiled(decoder.forward, params, cfg, x.x, mask=x.mask, **given).hidden)[0]


def first_row(text):
    return decoder.KVPrefix(text.k[:, :1], text.v[:, :1], text.mask[:1])


def test_of_a_text_written_in_full_each_head_attends_to_the_keys_it_kept_with_their_biases(pair, both, in_full):
    cfg, ours, _ = both
    text = first_row(ours.text)
    k, v = cache_code.read(in_full[0], cache_code.write(in_full[0], text))
    rng = np.random.default_rng(3)
    kept = rng.random((cfg.layers, 1, LENGTHS[0], cfg.kv_heads)) < 0.4
    kept[1, :, :, 0] = False
    bias = rng.normal(size=kept.shape).astype(np.float32)
    prefix = kv_prefix.choose(text._replace(k=k, v=v), jnp.asarray(kept), jnp.asarray(bias))
    wanted = Oracle(pair[0]).ask(IDS[0].tolist(), np.where(kept, bias, -np.inf)[:, 0])
    close(answer(pair, prefix), wanted)
    assert np.abs(np.asarray(wanted) - np.asarray(answer(pair, text))).max() > 0.1
