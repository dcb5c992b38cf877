"""Converters of well-known raw corpora: one function per corpus turns a row of the published files into a draft.

Fields without a counterpart in the record go to `others` unchanged, so nothing is lost. The content is the source's
text; a template (`--compose`) can join it with the title.
"""

from contextlib import suppress

import orjson

from z2all_ds.corpus.converters.fields import take_draft
from z2all_ds.corpus.converters.registry import source
from z2all_ds.corpus.draft import Draft
from z2all_ds.corpus.forms.slices import Row


@source("baike2018qa", form="jsonl")
def baike2018qa(row: Row) -> Draft:
    """Chinese: questions and answers of Baidu Zhidao (qid, category, title, desc, answer)."""
    return take_draft(row, "answer", "title", "category", "desc")


@source("news2016zh", form="jsonl")
def news2016zh(row: Row) -> Draft:
    """Chinese: news of 2014 to 2016 (news_id, title, content, source, time, keywords, desc)."""
    return take_draft(row, "content", "title", desc_field="desc")


@source("webtext2019zh", form="jsonl")
def webtext2019zh(row: Row) -> Draft:
    """Chinese: forum answers of quality (qid, title, desc, topic, star, content, answer_id, answerer_tags)."""
    return take_draft(row, "content", "title", "topic", "desc")


@source("wikipedia_cn", form="jsonl")
def wikipedia_cn(row: Row) -> Draft:
    """Chinese: Wikipedia articles as JSON lines (id, url, title, text)."""
    return take_draft(row, "text", "title")


@source("wikipedia_en", form="parquet")
def wikipedia_en(row: Row) -> Draft:
    """English: Wikipedia articles as Parquet (id, url, title, text)."""
    return take_draft(row, "text", "title")


@source("wudao", form="json_array")
def wudao(row: Row) -> Draft:
    """Chinese: web pages of WuDao, files of one JSON array (id, uniqueKey, titleUkey, dataType, title, content)."""
    return take_draft(row, "content", "title", "dataType")


@source("zhihu_kol", form="parquet")
def zhihu_kol(row: Row) -> Draft:
    """Chinese: answers of well-known Zhihu authors (INSTRUCTION, RESPONSE, SOURCE, METADATA)."""
    draft = take_draft(row, "RESPONSE", "INSTRUCTION")
    metadata = row.get("METADATA")
    if type(metadata) is str:
        with suppress(orjson.JSONDecodeError):  # stays text if a record cannot store it (NaN)
            row["METADATA"] = orjson.loads(metadata)
    return draft


@source("github_python", form="jsonl", is_code=True)
def github_python(row: Row) -> Draft:
    """Code: Python files of GitHub (repo_name, ref, path, copies, content)."""
    return take_draft(row, "content", "path")
