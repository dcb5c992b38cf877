"""The Z2all model: the Llama-2 structure with the Hugging Face interface and fused layers.

Importing this package registers Z2all and its weight names with transformers' Auto classes; importing only `z2all_ds`
stays light.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from z2all_ds.model import hf_conversion
from z2all_ds.model.configuration_z2all import Z2allConfig
from z2all_ds.model.modeling_z2all import Z2allForCausalLM, Z2allModel

AutoConfig.register(Z2allConfig.model_type, Z2allConfig, exist_ok=True)
AutoModel.register(Z2allConfig, Z2allModel, exist_ok=True)
AutoModelForCausalLM.register(Z2allConfig, Z2allForCausalLM, exist_ok=True)
hf_conversion.register(Z2allConfig.model_type)

__all__ = ["Z2allConfig", "Z2allForCausalLM", "Z2allModel"]
