"""Logs of what people were shown, and of what they did: ads, ratings, impressions, sessions, sales,
music, news.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from .maker import Log, Made, Maker, Outcome, Scale, seconds, spelled

WORDS = [
    *(
        "red",
        "blue",
        "small",
        "large",
        "fast",
        "cheap",
        "new",
        "old",
        "city",
        "river",
        "stone",
        "light",
        "paper",
    ),
    *(
        "glass",
        "market",
        "season",
        "holiday",
        "garden",
        "winter",
        "summer",
        "school",
        "health",
        "travel",
        "music",
    ),
    *(
        "film",
        "phone",
        "shoe",
        "dress",
        "chair",
        "lamp",
        "bread",
        "coffee",
        "sport",
        "news",
        "bank",
    ),
]
GENRES = [
    "Drama",
    "Comedy",
    "Action",
    "Thriller",
    "Romance",
    "Sci-Fi",
    "Children's",
    "Horror",
    "War",
    "Film-Noir",
]
COUNTRIES = ["de", "at", "ch", "fr", "it", "es", "nl", "pl", "se"]


def display_ads(m: Maker) -> Log:
    """Ads on sites and in apps: codes without names, an hour that is a date."""
    hours = m.moments("2014-10-21", 4)
    columns = {
        "id": (m.unique("{}", 10**18, 10**18 + 10**6), "ignore"),
        "click": (Outcome(0.17), "label"),
        "hour": (spelled(hours, "%y%m%d%H"), "time %y%m%d%H"),
        "C1": (m.ids([1001, 1002, 1005, 1007, 1010, 1012], 0.3), "categorical"),
        "banner_pos": (m.ids(5, 0.4, first=0), "categorical"),
        "site_id": (m.hexes(300, 8), "categorical"),
        "site_domain": (m.hexes(200, 8, 0.3), "categorical"),
        "site_category": (m.hexes(18, 8, 0.5), "categorical"),
        "app_id": (m.hexes(250, 8), "categorical"),
        "device_ip": (m.hexes(2500, 8, 0.1), "categorical"),
        "device_model": (m.hexes(400, 8, 0.3), "categorical"),
        "device_type": (m.ids([0, 1, 4, 5], 0.3), "categorical"),
        "device_conn_type": (m.ids([0, 2, 3, 5], 0.3), "categorical"),
        "C14": (m.codes(300, 375, 24_000, 1.2), "categorical"),
        "C15": (m.ids([120, 216, 300, 320, 480, 728, 1024], 0.3), "categorical"),
        "C17": (m.codes(90, 112, 2800, 1.2), "categorical"),
        "C20": (m.gone(m.codes(80, 100_000, 100_250, 1.2), 0.4, -1), "categorical"),
        "C21": (m.codes(50, 1, 255, 1.0), "categorical"),
    }
    return m.log(columns)


def hashed_ads(m: Maker) -> Log:
    """Ads with hashed ids of 64 bits and times in milliseconds."""
    columns = {
        "event_ts_ms": (seconds(m.moments("2023-05-02", 3), 1000), "time"),
        "user": (m.hashes(900), "categorical"),
        "ad": (m.hashes(150, 1.0), "categorical"),
        "advertiser_hash": (m.hashes(40), "categorical"),
        "placement": (m.hashes(25), "categorical"),
        "bid_usd": (m.amounts(0.6, 0.7, 4), "numeric"),
        "ctr_7d": (np.round(m.trend(m.random.beta(2, 60, m.rows), 1.0), 6), "numeric"),
        "impressions_7d": (m.counts(40), "numeric"),
        "is_vpn": (m.ids([0, 1], 0.3), "categorical"),
        "is_click": (Outcome(0.08), "label"),
    }
    return m.log(columns)


def search_ads(m: Maker) -> Log:
    """Ads beside the results of a search, with what was asked."""
    queries = [" ".join(m.random.choice(WORDS, n)) for n in m.random.integers(1, 5, 500)]
    titles = [" ".join(m.random.choice(WORDS, 5)).title() for _ in range(120)]
    columns = {
        "clicked": (Outcome(0.1), "label"),
        "query_text": (m.ids(queries), "categorical or list"),
        "keyword_id": (m.ids(700), "categorical"),
        "ad_title": (m.ids(titles), "categorical or list"),
        "match_type": (m.ids(["exact", "phrase", "broad"], 0.5), "categorical"),
        "depth": (m.ids(3, 0.3), "categorical or numeric"),
        "position": (m.ids(3, 0.6), "categorical"),
        "advertiser_id": (m.hashes(60), "categorical"),
        "user_id": (m.codes(900, 1, 23_907_634), "categorical"),
        "max_cpc": (m.amounts(0.9), "numeric"),
        "quality_score": (m.trend(m.random.integers(1, 11, m.rows), 0.9), "numeric"),
        "when": (spelled(m.moments("2017-11-06", 3), "%-m/%-d/%Y %H:%M"), "time %m/%d/%Y %H:%M"),
    }
    return m.log(columns)


def text_criteo(m: Maker) -> Log:
    """Tabs, no header, a label first, counts with gaps and hashed texts: like Criteo's, of another
    width.
    """
    columns = {"c0": (Outcome(0.25), "label")}
    for i in range(6):
        columns[f"c{i + 1}"] = (m.gone(m.counts(3.0 * 4**i), 0.1 * i), "numeric")
    for i in range(8):
        columns[f"c{i + 7}"] = (
            m.gone(m.hexes(4 * 3**i if i < 6 else 300, 8, 0.5), 0.05 * i),
            "categorical",
        )
    return m.log(columns, delimiter="\t", header=False)


def attribution(m: Maker) -> Log:
    """Impressions of campaigns; what came of them is in several columns, and -1 stands for none."""
    columns = {
        "timestamp": (np.sort(m.random.integers(0, 2_000_000, m.rows)), "time"),
        "uid": (m.codes(1100, 0, 28_000_000), "categorical"),
        "campaign": (m.codes(80, 73_322, 32_452_111, 0.9), "categorical"),
        "conversion": (Outcome(0.05), "label"),
        "cost": (m.amounts(0.0003, 1.0, 7), "numeric"),
        "time_since_last_click": (m.gone(m.counts(80_000), 0.4, -1), "numeric"),
        **{
            f"cat{i}": (m.codes(9 * i * i, 100, 30_000_000), "categorical") for i in (1, 2, 3, 5, 6)
        },
    }
    return m.log(columns, delimiter="\t")


def ratings(m: Maker) -> Log:
    """Ratings of films in half steps, by users and films without a word for id in their names'
    ends.
    """
    titles = [
        f"{' '.join(m.random.choice(WORDS, 2)).title()} ({1950 + i % 70})" for i in range(300)
    ]
    movies = m.ids(700)
    columns = {
        "userId": (m.ids(450), "categorical"),
        "movieId": (movies, "categorical"),
        "rating": (Scale([0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]), "label"),
        "timestamp": (seconds(m.moments("2009-03-01", 900)), "time"),
        "title": (m.ids(titles), "categorical"),
        "genres": (["|".join(genres) for genres in m.lists(GENRES, 4)], "list |"),
        "release_year": (m.per(movies, m.random.integers(1950, 2020, m.rows)), "numeric"),
        "runtime": (m.per(movies, m.random.normal(104, 18, m.rows).astype(np.int64)), "numeric"),
    }
    return m.log(columns)


def atomic_ratings(m: Maker) -> Log:
    """RecBole's atomic files, joined: names that state types."""
    columns = {
        "user_id:token": (m.ids(500), "categorical"),
        "item_id:token": (m.ids(600), "categorical"),
        "rating:float": (Scale([1, 2, 3, 4, 5]), "label"),
        "timestamp:float": (seconds(m.moments("1997-09-20", 200)), "time"),
        "age:token": (m.random.integers(7, 74, m.rows), "categorical"),
        "gender:token": (m.ids(["M", "F"], 0.2), "categorical"),
        "zip_code:token": (m.unique("{:05d}", 0, 99_999), "categorical or ignore"),
        "class:token_seq": ([" ".join(genres) for genres in m.lists(GENRES, 4)], "list"),
        "weight:float": (m.normal(5, 1, 2), "numeric"),
    }
    return m.log(columns, delimiter="\t")


def book_ratings(m: Maker) -> Log:
    """Ratings with zeros before numbers, semicolons and Latin names."""
    books = [f"{x:010d}" for x in m.random.choice(900_000_000, 700, replace=False)]
    years = m.gone(m.trend(m.random.integers(1960, 2005, m.rows), 0.3), 0.05, 0)
    columns = {
        "User-ID": (m.ids(800), "categorical"),
        "ISBN": (m.ids(books), "categorical"),
        "Book-Author": (
            m.ids([f"{a.title()} {b.title()}" for a in WORDS[:15] for b in WORDS[15:]]),
            "categorical",
        ),
        "Year-Of-Publication": (years, "numeric"),
        "Publisher": (m.ids([f"{w.title()} & Co., Inc." for w in WORDS]), "categorical"),
        "Age": (m.gone(m.random.integers(8, 90, m.rows), 0.3, "NULL"), "numeric"),
        "Book-Rating": (Scale(range(1, 11)), "label"),
    }
    return m.log(columns, delimiter=";")


def news_impressions(m: Maker) -> Log:
    """Impressions of news as MIND writes them, a row for each candidate."""
    asked = np.sort(m.random.integers(0, m.rows // 5, m.rows))
    moments = m.moments("2019-11-11", 1)
    articles = [f"N{x}" for x in m.random.choice(np.arange(1000, 60_000), 500, replace=False)]
    history = [" ".join(x) for x in m.lists(articles, 12)]
    users = m.random.integers(100, 94_000, m.rows)
    kinds = ["news", "sports", "finance", "lifestyle", "weather", "video"]
    categories = {name: kinds[i % 6] for i, name in enumerate(articles)}
    shown = m.ids(articles)
    columns = {
        "impression_id": (asked, "group"),
        "user": ([f"U{users[i]}" for i in asked], "categorical"),
        "time": (
            [moments[i].strftime("%-m/%-d/%Y %-I:%M:%S %p") for i in asked],
            "time %m/%d/%Y %I:%M:%S %p",
        ),
        "history": ([history[i] for i in asked], "list"),
        "candidate": (shown, "categorical"),
        "category": ([categories[name] for name in shown], "categorical"),
        "title": (m.prose(WORDS), "ignore"),
        "clicked": (Outcome(0.12), "label"),
    }
    return m.log(columns, delimiter="\t")


def feed_impressions(m: Maker) -> Log:
    """Impressions of a newspaper in Parquet: typed times, lists, booleans, vectors."""
    asked = np.sort(m.random.integers(0, m.rows // 4, m.rows))
    moments, articles = (
        m.moments("2023-05-18", 5),
        m.random.choice(np.arange(9_000_000, 9_800_000), 400).tolist(),
    )
    history = m.lists(articles, 15)
    vectors = m.random.normal(0, 1, (m.rows, 8)).astype(np.float32)
    columns = {
        "impression_id": (asked, "group"),
        "impression_time": (pa.array([moments[i] for i in asked], pa.timestamp("us")), "time"),
        "session_id": (asked // 3, "session or ignore"),
        "article_id": (m.ids(articles), "categorical"),
        "device_type": (m.ids(3, 0.3), "categorical"),
        "read_time": (m.gone(m.amounts(20.0, 1.0), 0.2), "numeric"),
        "is_sso_user": (m.random.random(m.rows) < 0.3, "categorical"),
        "is_subscriber": (m.random.random(m.rows) < 0.1, "categorical"),
        "gender": (m.gone(m.ids([0, 1], 0.1), 0.9), "categorical"),
        "postcode": (m.gone(m.ids(5, 0.2, first=0), 0.9), "categorical"),
        "age": (m.gone((10 * m.random.integers(2, 9, m.rows)).tolist(), 0.5), "numeric"),
        "user_id": ((asked * 7919) % 1999 + 10_000, "categorical"),
        "history_ids": ([history[i] for i in asked], "list"),
        "topics": (m.lists(["politics", "sport", "crime", "royal", "music", "auto"], 3), "list"),
        "title_embedding": (
            pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 8),
            "vector",
        ),
        "published": (pa.array([moments[i].date() for i in asked], pa.date32()), "time or ignore"),
        "clicked": (Outcome(0.2, False, True), "label"),
    }
    return m.log(columns, form="parquet")


def shop_sessions(m: Maker) -> Log:
    """Views in sessions of a shop, with times of a zone and gaps in names."""
    session = np.sort(m.random.integers(0, m.rows // 4, m.rows))
    names = [f"{x:016x}" for x in m.random.integers(0, 2**62, m.rows).tolist()]
    kinds = [
        "electronics.phone",
        "electronics.audio",
        "apparel.shoes",
        "furniture.lamp",
        "kids.toys",
        "auto.tyres",
    ]
    columns = {
        "event_time": (spelled(m.moments("2019-11-01", 7), "%Y-%m-%d %H:%M:%S UTC"), "time"),
        "event_type": (m.ids(["view", "cart", "remove"], 0.8), "categorical"),
        "product_id": (m.codes(500, 1_000_000, 60_000_000), "categorical"),
        "category_id": (
            m.codes(60, 2_053_013_551_000_000_000, 2_053_013_566_000_000_000),
            "categorical",
        ),
        "category_code": (m.gone(m.ids(kinds), 0.3), "categorical"),
        "brand": (m.gone(m.ids([f"brand{w}" for w in WORDS]), 0.15), "categorical"),
        "price": (m.amounts(80.0, 1.1), "numeric"),
        "user_session": ([names[i] for i in session], "group or session"),
        "purchased": (Outcome(0.06), "label"),
    }
    return m.log(columns)


def click_sessions(m: Maker) -> Log:
    """Clicks of sessions, with a count of what came before and the dwell in milliseconds."""
    session = np.sort(m.random.integers(0, m.rows // 5, m.rows))
    columns = {
        "SessionID": (session + 9_194_111, "group or session"),
        "Timestamp": (spelled(m.moments("2014-04-07", 20), "%Y-%m-%dT%H:%M:%S.125Z"), "time"),
        "ItemID": (m.codes(600, 214_500_000, 214_860_000), "categorical"),
        "Category": (m.ids(["0", "S", "1", "2", "3", "4", "5"], 0.5), "categorical"),
        "clicks_before": (m.counts(4), "numeric"),
        "dwell_ms": (m.amounts(25_000.0, 1.2, 0), "numeric"),
        "Quantity": (m.gone(m.counts(2, 1), 0.1), "numeric"),
        "has_bought": (Outcome(0.08, "no", "yes"), "label yes"),
    }
    return m.log(columns)


def music(m: Maker) -> Log:
    """Songs heard again or not: long codes of users and songs, dates as numbers."""
    artists = [f"{a.title()} {b.title()}" for a in WORDS[:12] for b in WORDS[12:24]]
    genres = ["465", "958", "1609", "2022", "1259", "921", "139", "786"]
    joined = [t.strftime("%Y%m%d") for t in m.moments("2008-01-01", 3000)]
    songs = m.hexes(900, 24)
    columns = {
        "msno": (m.hexes(500, 24), "categorical"),
        "song_id": (songs, "categorical"),
        "source_system_tab": (
            m.ids(["my library", "discover", "search", "radio", "null"], 0.6),
            "categorical",
        ),
        "source_type": (
            m.ids(["local-library", "online-playlist", "album", "song-based-playlist"], 0.5),
            "categorical",
        ),
        "song_length": (
            m.per(songs, m.random.normal(240_000, 40_000, m.rows).astype(np.int64)),
            "numeric",
        ),
        "genre_ids": (["|".join(x) for x in m.lists(genres, 3)], "list |"),
        "artist_name": (m.ids(artists), "categorical"),
        "language": (m.gone(m.ids([3.0, 31.0, 52.0, 17.0, 10.0, -1.0]), 0.02), "categorical"),
        "city": (m.ids(22, 0.2), "categorical"),
        "bd": (m.trend(m.random.integers(14, 70, m.rows), 0.3), "numeric"),
        "gender": (m.gone(m.ids(["female", "male"], 0.2), 0.4), "categorical"),
        "registered_via": (m.ids([3, 4, 7, 9, 13], 0.4), "categorical"),
        "registration_init_time": (m.random.permutation(joined), "time %Y%m%d or ignore"),
        "target": (Outcome(0.5), "label"),
    }
    return m.log(columns)


def jobs(m: Maker) -> Log:
    """Adverts for jobs that were shown, with lists of roles and steps of a career."""
    roles = [str(x) for x in m.random.choice(np.arange(10_000, 99_999), 200, replace=False)]
    columns = {
        "user_id": (m.codes(800, 1000, 2_800_000), "categorical"),
        "item_id": (m.codes(600, 1000, 2_900_000), "categorical"),
        "created_at": (seconds(m.moments("2015-08-10", 60)), "time"),
        "jobroles": ([",".join(x) for x in m.lists(roles, 6)], "list ,"),
        "career_level": (
            m.gone(m.trend(m.random.integers(0, 7, m.rows), 0.5), 0.1),
            "categorical or numeric",
        ),
        "discipline_id": (m.ids(23, 0.4), "categorical"),
        "industry_id": (m.ids(24, 0.4), "categorical"),
        "country": (m.ids(COUNTRIES, 0.3), "categorical"),
        "years_of_experience": (m.trend(m.random.integers(0, 30, m.rows)), "numeric"),
        "num_previous_jobs": (m.counts(2), "numeric"),
        "salary": (m.normal(48_000, 9000, 0), "numeric"),
        "latitude": (m.gone(np.round(m.random.uniform(47, 55, m.rows), 1), 0.2), "numeric"),
        "is_remote": (m.ids(["True", "False"], 0.4), "categorical"),
        "applied": (Outcome(0.15, "no", "yes"), "label yes"),
    }
    return m.log(columns)


def bandit(m: Maker) -> Log:
    """A log of a bandit, with propensities and weights of the sample."""
    propensity = np.round(m.random.dirichlet([1.0] * 34, m.rows)[:, 0] + 1e-3, 6)
    columns = {
        "": (np.arange(m.rows), "ignore"),
        "timestamp": (spelled(m.moments("2019-11-24", 7), "%Y-%m-%d %H:%M:%S.5+00:00"), "time"),
        "item_id": (m.ids(34, 0.8, first=0), "categorical"),
        "position": (m.ids(3, 0.3), "categorical"),
        "propensity_score": (propensity, "ignore"),
        **{f"user_feature_{i}": (m.hexes(4 + 3 * i, 32, 0.4), "categorical") for i in range(4)},
        **{
            f"affinity_{i}": (np.round(m.trend(m.random.beta(1, 9, m.rows), 0.3), 4), "numeric")
            for i in range(3)
        },
        "sample_weight": (np.round(1 / np.maximum(propensity, 0.01), 4), "weight"),
        "click": (Outcome(0.04), "label"),
    }
    return m.log(columns)


def app_clicks(m: Maker) -> Log:
    """Clicks on ads for apps, all of them small whole numbers; when the app was installed tells the
    label.
    """
    click_time = m.moments("2017-11-06", 3)
    installed = m.gone(spelled(click_time, "%Y-%m-%d %H:%M:%S"), 0.96)
    columns = {
        "ip": (m.codes(1200, 9, 364_000), "categorical"),
        "app": (m.codes(120, 1, 700, 1.2), "categorical"),
        "device": (m.codes(30, 0, 4000, 0.5), "categorical"),
        "os": (m.codes(60, 0, 800, 0.6), "categorical"),
        "channel": (m.codes(110, 0, 500, 1.0), "categorical"),
        "click_time": (spelled(click_time, "%Y-%m-%d %H:%M:%S"), "time"),
        "attributed_time": (installed, "ignore"),
        "is_attributed": (Outcome(0.05), "label"),
    }
    return m.log(columns)


def installs(m: Maker) -> Log:
    """Installs of an app, with codes of networks and phones and zeros before numbers."""
    columns = {
        "install": (Outcome(0.1, "False", "True"), "label"),
        "device_uuid": ([str(x) for x in m.hexes(1500, 32, 0.3)], "categorical"),
        "phone_prefix": (
            m.ids([f"00{x}" for x in (49151, 49171, 43664, 41791, 33612, 39333)], 0.4),
            "categorical",
        ),
        "mcc_mnc": (
            m.ids([26201, 26202, 26203, 23201, 23203, 22801, 20801, 22201], 0.5),
            "categorical",
        ),
        "tac": (m.codes(150, 35_000_000, 35_999_999), "categorical"),
        "os_version": (m.ids(["10.3.1", "11.0", "11.2.6", "12.1", "9.3.5"], 0.4), "categorical"),
        "app_build": (m.codes(25, 2100, 2190, 0.7), "categorical or numeric"),
        "battery_level": (m.normal(0.6, 0.15, 2), "numeric"),
        "screen_width": (m.ids([320, 360, 375, 414, 768, 1080], 0.2), "categorical or numeric"),
        "locale": (m.ids(["de_DE", "de_AT", "en_US", "en_GB", "fr_FR"], 0.3), "categorical"),
        "days_since_last_open": (m.gone(m.counts(12), 0.2, -999), "numeric"),
        "created_ms": (seconds(m.moments("2021-01-11", 10), 1000), "time"),
        "organic": (m.ids(["True", "False"], 0.5), "categorical"),
    }
    return m.log(columns)


def mails(m: Maker) -> Log:
    """Mails that were sent: two outcomes, few subjects, a text of free words."""
    subjects = [" ".join(m.random.choice(WORDS, 4)).capitalize() + "!" for _ in range(25)]
    sent = [t.strftime("%d.%m.%Y %H:%M") for t in m.moments("2022-02-03", 30)]
    columns = {
        "mail_id": (m.unique("{:08x}", 16**6, 16**6 + 10**6), "ignore"),
        "sent_at": (sent, "time %d.%m.%Y %H:%M"),
        "recipient": (m.hexes(900, 32), "categorical"),
        "campaign": (m.ids(["spring_sale", "welcome", "win_back", "news"], 0.5), "categorical"),
        "subject": (m.ids(subjects), "categorical"),
        "body_preview": (m.prose(WORDS, 8, 15), "ignore"),
        "subject_length": (m.trend(m.random.integers(12, 60, m.rows)), "numeric"),
        "mails_last_month": (m.counts(5), "numeric"),
        "domain": (
            m.ids(["mail.example", "post.example", "web.example", "inbox.example"], 0.3),
            "categorical",
        ),
        "click": (Outcome(0.06), "label"),
        "purchase": (Outcome(0.02), "label or ignore"),
    }
    return m.log(columns)


def hotels(m: Maker) -> Log:
    """Hotels in the results of searches, two outcomes, and columns of -1, 0, 1 with gaps."""
    search = np.sort(m.random.integers(0, m.rows // 8, m.rows))
    moments, hotels = m.moments("2013-01-05", 90), m.codes(700, 1, 140_800)
    columns = {
        "srch_id": (search + 1, "group"),
        "date_time": ([moments[i].strftime("%Y-%m-%d %H:%M:%S") for i in search], "time"),
        "site_id": (m.ids(12, 0.2), "categorical"),
        "visitor_location_country_id": (m.ids(120, 0.2), "categorical"),
        "prop_id": (hotels, "categorical"),
        "prop_starrating": (m.per(hotels, m.random.integers(0, 6, m.rows)), "numeric"),
        "prop_review_score": (
            m.gone(m.per(hotels, m.random.integers(4, 11, m.rows) / 2), 0.1),
            "numeric",
        ),
        "prop_rooms": (m.per(hotels, 5 + m.random.geometric(0.02, m.rows)), "numeric"),
        "prop_brand_bool": (m.ids([0, 1], 0.2), "categorical"),
        "position": (m.trend(m.random.integers(1, 39, m.rows), -0.8), "categorical or numeric"),
        "price_usd": (m.amounts(120.0), "numeric"),
        "srch_length_of_stay": (m.counts(2, 1), "numeric"),
        "srch_adults_count": (
            m.random.choice([1, 2, 3, 4], m.rows, p=[0.3, 0.5, 0.1, 0.1]),
            "numeric",
        ),
        "srch_children_count": (
            m.random.choice([0, 1, 2, 3], m.rows, p=[0.7, 0.15, 0.1, 0.05]),
            "numeric",
        ),
        "comp1_rate": (m.gone(m.ids([-1, 0, 1], 0.2), 0.7, "NULL"), "categorical or numeric"),
        "orig_destination_distance": (m.gone(m.amounts(700.0, 1.2), 0.3, "NULL"), "numeric"),
        "booking_bool": (Outcome(0.03), "label or ignore"),
        "click_bool": (Outcome(0.05), "label"),
    }
    return m.log(columns)


LOGS: tuple[Made, ...] = (
    *(
        display_ads,
        hashed_ads,
        search_ads,
        text_criteo,
        attribution,
        ratings,
        atomic_ratings,
        book_ratings,
    ),
    *(
        news_impressions,
        feed_impressions,
        shop_sessions,
        click_sessions,
        music,
        jobs,
        bandit,
        app_clicks,
        installs,
    ),
    *(mails, hotels),
)
