"""An agent that asks the model several times, and answers with what it was told most often.

    episode:
      agent: agent:solve
      reward: exact

Each request is trained on with the reward of the answer. SPO serves the policy at `task.base_url` during the episode.
"""

import asyncio
from collections import Counter

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

VOTES = 3
# One client for all tasks, as making one takes 50 ms; no proxies of the environment: the endpoint is local.
HTTP = DefaultAsyncHttpxClient(trust_env=False)
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", http_client=HTTP)


async def solve(task):
    """The answer to one task, which the reward scores."""
    model = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    answers = await asyncio.gather(*(ask(model, task) for _ in range(VOTES)))
    return Counter(answers).most_common(1)[0][0]


async def ask(model, task):
    messages = [{"role": "user", "content": f"{task.prompt}\nAnswer with a number only."}]
    reply = await model.chat.completions.create(model=task.model, messages=messages)
    return (reply.choices[0].message.content or "").strip()
