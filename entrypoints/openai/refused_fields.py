"""Fields of OpenAI's and vLLM's APIs that the generation endpoints do not support."""

from octavo.entrypoints.openai.fields import Refused

REFUSED_EVERYWHERE: Refused = {
    "ec_transfer_params": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "session_id": (),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
REFUSED_IN_CHAT: Refused = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "return_mm_kwargs": (True,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
REFUSED_IN_COMPLETIONS: Refused = {
    "best_of": (1,),
    "prompt_embeds": (),
    "suffix": ("",),
}
