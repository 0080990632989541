"""Data from text, as an object of a pydantic class: `python extraction.py [MODEL]`. Needs the package pydantic."""

import sys

import quadriga
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)
    hobbies: list[str] = Field(max_length=4)


model = quadriga.Model(sys.argv[1] if len(sys.argv) > 1 else None, n_ctx=1024)
text = "Jason is 25 years old. He likes chess and swimming."
answer = model.chat(f"Extract the person: {text}", response_format=Person, temperature=0, max_tokens=120)

# The answer satisfies the schema from its first token to its last; whether it is true is up to the model.
person = answer.parsed
print(answer.text)
assert isinstance(person, Person)
print(f"{person.name}, {person.age}: {', '.join(person.hobbies)}")
