"""examples/with_vllm.py against a server that checks a body as vLLM 0.33.0 does and answers with the torch model."""

import base64
import contextlib
import http.server
import io
import json

import numpy as np
import pytest

import lw_jax
from examples import with_vllm
from lw_jax.core.errors import UserError
from tests import fake_hub, tiny

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers")

SAME = 2e-5  # fp32 embeddings of unit size: a row alone and in a batch
TEXT, QUESTION = "Mara Ellis lives in Lisbon. Tom Reed works as a baker.", "Where does Mara Ellis live?"
HOLE = "<prompt_embeds>"  # the server's own token for a content part
STRING = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }} {{ date_string }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {{ date_string }}\n{% endif %}"
)
COMMON = {"model", "temperature", "repetition_penalty", "stop_token_ids"}
OWN_PENALTY = 1.5  # of the model's generation_config.json, which the server takes where a body names none
KNOWN = {  # of those that vLLM's two protocols have
    "/v1/completions": COMMON | {"prompt_embeds", "max_tokens"},
    "/v1/chat/completions": COMMON
    | {"messages", "max_completion_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"},
}


class Server:
    """A model folder behind vLLM's two routes; `seen` holds a request's path, body, embeddings and headers."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.tokenizer.add_special_tokens({"additional_special_tokens": [HOLE]})
        self.hole = self.tokenizer.convert_tokens_to_ids(HOLE)
        self.tokenizer.chat_template = STRING
        self.table, self.seen = self.model.get_input_embeddings(), []

    def answer(self, path, body, headers):
        """(status, reply) of a request; what vLLM refuses is a ValueError."""
        if unknown := set(body) - KNOWN[path]:
            raise ValueError(f"no fields of the protocol: {unknown}")
        if body.get("model", "tiny") != "tiny":
            message = f"here is no {body['model']}"
            return 404, {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}
        chat = path == "/v1/chat/completions"
        x = self.read_messages(body) if chat else self.load(body["prompt_embeds"])
        self.seen.append((path, body, x.numpy(), headers))
        limit, stops = body["max_completion_tokens" if chat else "max_tokens"], body["stop_token_ids"]
        assert body["temperature"] == 0.0 and all(type(stop) is int for stop in stops) and type(limit) is int
        text = self.generate(x, limit, stops, body.get("repetition_penalty", OWN_PENALTY))
        return 200, {"choices": [{"message": {"role": "assistant", "content": text}} if chat else {"text": text}]}

    def load(self, data):
        """renderers/embed_utils.py:safe_load_prompt_embeds: float [t, d] from base64 of torch.save."""
        loaded = torch.load(io.BytesIO(base64.b64decode(data, validate=True)), weights_only=True, map_location="cpu")
        assert isinstance(loaded, torch.Tensor)
        loaded = loaded.to_dense()
        loaded = loaded.squeeze(0) if loaded.dim() > 2 else loaded
        if loaded.dim() != 2 or loaded.shape[1] != self.table.embedding_dim:
            raise ValueError(f"{tuple(loaded.shape)} are no positions of {self.table.embedding_dim} values")
        assert loaded.is_floating_point()
        return loaded.to(self.model.dtype)

    def read_messages(self, body):
        """Parts become text with a hole for each tensor, then a prompt in the chat template, then embeddings."""
        turns, tensors = [], []
        for message in body["messages"]:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            texts = []
            for part in parts:
                if part["type"] == "prompt_embeds":
                    assert set(part) == {"type", "data"} and part["data"]
                    tensors.append(self.load(part["data"]))
                    texts.append(HOLE)
                else:
                    assert set(part) == {"type", "text"} and part["type"] == "text" and HOLE not in part["text"]
                    texts += [part["text"]] if part["text"] else []
            turns.append({"role": message["role"], "content": "\n".join(texts)})
        flags = {"add_generation_prompt": True, "continue_final_message": False} | {
            key: body[key] for key in ("add_generation_prompt", "continue_final_message") if key in body
        }
        assert not all(flags.values()), "vLLM refuses both"
        ids = self.tokenizer.apply_chat_template(turns, return_dict=False, **flags, **body["chat_template_kwargs"])
        assert ids.count(self.hole) == len(tensors)
        rest = iter(tensors)
        with torch.no_grad():
            return torch.cat([next(rest) if i == self.hole else self.table(torch.tensor([i])) for i in ids])

    def generate(self, x, limit, stops, penalty):
        settings = {"do_sample": False, "eos_token_id": [*stops, self.model.config.eos_token_id], "pad_token_id": 0}
        seen = torch.ones(1, len(x), dtype=torch.long)
        settings |= {"repetition_penalty": penalty}
        ids = self.model.generate(inputs_embeds=x[None], attention_mask=seen, max_new_tokens=limit, **settings)
        return self.tokenizer.decode(ids[0], skip_special_tokens=True)


@contextlib.contextmanager
def serve(folder=None, reply=None):
    """Yields (url, server) of a model's folder; without one `reply` is sent in place of an answer."""
    server = Server(folder) if folder else None

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, said = (200, reply) if server is None else server.answer(self.path, body, self.headers)
            except (ValueError, LookupError, AssertionError) as error:
                error = {"message": f"{error}", "type": "BadRequestError", "param": None, "code": 400}
                status, said = 400, {"error": error}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said if isinstance(said, bytes) else json.dumps(said).encode())

        def log_message(self, *args):
            pass

    with fake_hub.serve(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as listener:
        yield f"http://127.0.0.1:{listener.server_port}", server


def make_readers(folder):
    """Both readers' folders, each with a chat template."""
    readers = tiny.readers(folder)
    for one in readers.values():
        file = one / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": STRING}))
    return readers


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    file = tmp_path_factory.mktemp("notes") / "notes.txt"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Readers, folder and wire of a run without training; llama's prompts are in its chat template, qwen's are not."""
    folder = tmp_path_factory.mktemp("plain")
    readers = make_readers(folder / "readers")
    words = {"llms__llama__template": "chat", "data__question_tokens": 128, "eval__max_new_tokens": 6}
    wire = tiny.make_wire(folder / "readers", **words)
    return readers, tiny.start_folder(folder / "run", wire.recipe.cfg), wire


@pytest.fixture
def opened(monkeypatch):
    """Puts an opened wire in the place of opening it again, which takes seconds; the configuration it is asked for."""
    asked = []

    def put(wire):
        monkeypatch.setattr(lw_jax, "load_wire", lambda path, config: asked.append(config) or wire, raising=False)
        return asked

    return put


def ask(run, notes, *words, reader="llama", question=QUESTION, given="--context"):
    return with_vllm.main(["--workdir", str(run), "--reader", reader, given, notes, "--question", question, *words])


def test_completion_is_the_wire_s_answer(plain, notes, opened, capsys, monkeypatch, tmp_path):
    (readers, run, wire), reader = plain, "qwen"
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    message, configs = wire.write(TEXT), opened(wire)
    words = ("--model", "tiny", "--config.eval.batch=4")
    with serve(readers[reader]) as (url, server):
        answered = []
        for question in (QUESTION, "Who is a baker?"):
            assert ask(run, notes, "--url", f"{url}/v1/", *words, reader=reader, question=question) == 0
            answered.append(capsys.readouterr().out.split("answer: ")[1].strip())
    assert answered == wire.read(message, reader, [QUESTION, "Who is a baker?"]) and any(answered)
    path, body, x, headers = server.seen[0]
    assert (headers["Content-Type"], headers["Authorization"]) == ("application/json", "Bearer sesame")
    assert path == "/v1/completions" and configs[0] == {"eval.batch": "4"}
    assert body["stop_token_ids"] == list(wire.recipe.tokenizers[reader].stops) and body["max_tokens"] == 6
    np.testing.assert_array_equal(x, wire.prompt_embeds(message, reader, QUESTION))
    out, written = tmp_path / "body.json", tmp_path / "message.lwjx"
    written.write_bytes(message)
    assert ask(run, str(written), "--out", str(out), *words, reader=reader, given="--message") == 0
    assert json.loads(out.read_text()) == body


def test_chat_prompt_is_that_of_a_reader_in_its_template(plain, notes, opened, capsys, monkeypatch):
    readers, run, wire = plain
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    message, _ = wire.write(TEXT), opened(wire)
    with serve(readers["llama"]) as (url, server):
        assert ask(run, notes, "--url", url, "--api", "chat") == 0
    said, (_, body, x, headers) = capsys.readouterr(), server.seen[0]
    np.testing.assert_allclose(x, wire.prompt_embeds(message, "llama", QUESTION), atol=SAME)
    assert said.out.split("answer: ")[1].strip() == wire.read(message, "llama", QUESTION) and "note" not in said.err
    assert "Authorization" not in headers and QUESTION in body["messages"][0]["content"][2]["text"]


def test_server_s_refusals_are_told_in_its_words(plain, notes, opened):
    readers, run, wire = plain
    opened(wire)
    with serve(readers["llama"]) as (url, _), serve(reply={"choices": []}) as (empty, _):
        for words, told in {
            ("--url", url, "--reader", "qwen"): r"/v1/completions: HTTP 400: \(\d+, 56\) .* 48 values",
            ("--url", url, "--model", "other"): "HTTP 404: here is no other",
            ("--url", empty): empty,
        }.items():
            with pytest.raises(UserError, match=told):
                ask(run, notes, *words)
    with pytest.raises(UserError, match=f"{url}.*refused"):
        ask(run, notes, "--url", url)


def test_what_no_server_could_take_is_refused_before_a_weight_is_read(root, notes, monkeypatch, tmp_path):
    monkeypatch.setattr(lw_jax, "load_wire", lambda *given: pytest.fail("weights are read"), raising=False)
    kv, out = tiny.make_config(root, adapter__kind="kv"), tmp_path / "body.json"
    tiny.start_folder(tmp_path / "kv", kv)
    for words, told in {
        ("--out", str(out)): r"adapter\.kind='kv'.*--config\.adapter\.kind=embeddings",
        (): "--out and --url",
        ("--url", "localhost:8000"): "--url localhost:8000",
    }.items():
        with pytest.raises(UserError, match=told):
            ask(tmp_path / "kv", notes, *words)
    assert not out.exists()
