"""The well-known raw corpora, one function each: a row as it lies in the published files becomes a draft.

A field with a place in the record goes there; every other one goes to `others` under its own name, null or nested as it
is, so nothing is lost. The content is the source's text itself: joining it with a title is the business of a template.
"""

from typing import Any

import orjson

from z2all_ds.corpus.converters.fields import take_needed, take_optional
from z2all_ds.corpus.converters.registry import source
from z2all_ds.corpus.draft import Draft
from z2all_ds.corpus.forms.slices import Row


@source("baike2018qa", form="jsonl")
def baike2018qa(row: Row) -> Draft:
    """Chinese: questions and answers of Baidu Zhidao (qid, category, title, desc, answer)."""
    content, title = take_needed(row, "answer", "title")
    return Draft(title, content, take_optional(row, "category"), take_optional(row, "desc"), row)


@source("news2016zh", form="jsonl")
def news2016zh(row: Row) -> Draft:
    """Chinese: news of 2014 to 2016 (news_id, title, content, source, time, keywords, desc)."""
    content, title = take_needed(row, "content", "title")
    return Draft(title, content, "", take_optional(row, "desc"), row)


@source("webtext2019zh", form="jsonl")
def webtext2019zh(row: Row) -> Draft:
    """Chinese: forum answers of quality (qid, title, desc, topic, star, content, answer_id, answerer_tags)."""
    content, title = take_needed(row, "content", "title")
    return Draft(title, content, take_optional(row, "topic"), take_optional(row, "desc"), row)


@source("wikipedia_cn", form="jsonl")
def wikipedia_cn(row: Row) -> Draft:
    """Chinese: Wikipedia articles as JSON lines (id, url, title, text)."""
    content, title = take_needed(row, "text", "title")
    return Draft(title, content, "", "", row)


@source("wikipedia_en", form="parquet")
def wikipedia_en(row: Row) -> Draft:
    """English: Wikipedia articles as Parquet (id, url, title, text)."""
    content, title = take_needed(row, "text", "title")
    return Draft(title, content, "", "", row)


@source("wudao", form="json_array")
def wudao(row: Row) -> Draft:
    """Chinese: web pages of WuDao, files of one JSON array (id, uniqueKey, titleUkey, dataType, title, content)."""
    content, title = take_needed(row, "content", "title")
    return Draft(title, content, take_optional(row, "dataType"), "", row)


@source("zhihu_kol", form="parquet")
def zhihu_kol(row: Row) -> Draft:
    """Chinese: answers of well-known Zhihu authors (INSTRUCTION, RESPONSE, SOURCE, METADATA)."""
    content, title = take_needed(row, "RESPONSE", "INSTRUCTION")
    metadata = row.get("METADATA")
    if type(metadata) is str:
        row["METADATA"] = _parsed(metadata)
    return Draft(title, content, "", "", row)


def _parsed(metadata: str) -> Any:
    """JSON as what it says. The string itself if it is not JSON, or JSON that no record can hold (NaN)."""
    try:
        return orjson.loads(metadata)
    except orjson.JSONDecodeError:
        return metadata


@source("github_python", form="jsonl", is_code=True)
def github_python(row: Row) -> Draft:
    """Code: Python files of GitHub (repo_name, ref, path, copies, content)."""
    content, title = take_needed(row, "content", "path")
    return Draft(title, content, "", "", row)
