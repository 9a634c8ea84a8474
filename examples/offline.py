"""Complete prompts and answer a chat in this process, without a server."""

from octavo import LLM, SamplingParams

llm = LLM()  # SmolLM2-135M-Instruct; a Hub id, a folder or a .gguf file works as well
params = SamplingParams(temperature=0, max_tokens=24)

for output in llm.generate(["The capital of France is", "1, 2, 3, 4, 5,"], params):
    print(repr(output.prompt), "->", repr(output.outputs[0].text))

question = [{"role": "user", "content": "What is the capital of France?"}]
print(llm.chat(question, params)[0].outputs[0].text)
