"""The model of the ViT example: a small one from scratch, or a pretrained one to fine-tune."""

from typing import Any

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

IMAGE_SIZE = 16


def build_model(name: str | None, label_names: list[str]) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """A model with one output per label, and the processor that makes its inputs.

    Args:
        name: a model on the hub or a folder to fine-tune; ``None`` makes a small ViT with random weights.
        label_names: names of the classes, in the order of their numbers.
    """
    labels = {
        "id2label": dict(enumerate(label_names)),  # its length is the number of outputs
        "label2id": {label: number for number, label in enumerate(label_names)},
    }
    if name is None:
        processor = ViTImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
        return ViTForImageClassification(small_config(labels)), processor
    config = AutoConfig.from_pretrained(name, **labels)
    # A head for other labels does not fit and starts anew; weights kept in half precision are trained in fp32.
    model = AutoModelForImageClassification.from_pretrained(
        name, config=config, ignore_mismatched_sizes=True, dtype="float32"
    )
    return model, load_processor(name)


def small_config(labels: dict[str, Any]) -> ViTConfig:
    """A ViT that learns 8 x 8 digits in a minute or two on a CPU: 16 patches and 6 blocks."""
    return ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=IMAGE_SIZE // 4,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=128,
        initializer_range=0.1,  # about hidden_size ** -0.5; the usual 0.02 suits a width of 768 and starts slowly here
        **labels,
    )


def load_processor(name: str) -> BaseImageProcessor:
    """The image processor of ``name``, always the PIL one: torchvision's rounds otherwise, where that is installed."""
    return AutoImageProcessor.from_pretrained(name, backend="pil")
