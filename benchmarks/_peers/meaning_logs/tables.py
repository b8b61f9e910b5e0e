"""Small tables of people, contracts, flights and payments, as they are passed round to learn
from.
"""

from __future__ import annotations

import json

import numpy as np

from .maker import Log, Made, Maker, Outcome, Scale, seconds, spelled

STATES = ["CA", "NY", "TX", "FL", "WA", "OH", "MN", "GA", "IL", "OR"]
NAMES = [
    "Ann",
    "Bob",
    "Carla",
    "Dan",
    "Eve",
    "Fred",
    "Gus",
    "Hana",
    "Ida",
    "Jon",
    "Kim",
    "Leo",
    "Mia",
    "Noa",
]
STREETS = ["Oak St", "Main Ave", "Hill Rd", "Lake Dr", "Park Ln"]
WORDS = [
    *(
        "customer",
        "asked",
        "about",
        "the",
        "account",
        "and",
        "late",
        "payment",
        "but",
        "a",
        "new",
        "card",
        "was",
    ),
    *("sent", "to", "their", "home", "last", "week"),
]
YES_NO = ["Yes", "No"]


def _census(m: Maker, names: list[str], **form: bool) -> Log:
    """The columns of the census of 1994: cells with a blank before them, ? for missing ones."""
    classes = ["Private", "Self-emp-not-inc", "Local-gov", "State-gov", "Federal-gov"]
    schools = ["HS-grad", "Some-college", "Bachelors", "Masters", "11th", "Assoc-voc", "Doctorate"]
    jobs = [
        "Adm-clerical",
        "Exec-managerial",
        "Craft-repair",
        "Sales",
        "Other-service",
        "Tech-support",
    ]
    columns = [
        (m.trend(m.random.integers(17, 91, m.rows), 0.9), "numeric"),
        (m.gone(m.ids(classes, 0.4), 0.06, "?"), "categorical"),
        (m.amounts(180_000.0, 0.5, 0, 0.0), "numeric or weight"),
        (m.ids(schools, 0.7), "categorical"),
        (m.trend(m.random.integers(1, 17, m.rows), 0.9), "numeric or categorical"),
        (m.ids(["Married-civ-spouse", "Never-married", "Divorced", "Widowed"], 0.9), "categorical"),
        (m.gone(m.ids(jobs, 0.6), 0.06, "?"), "categorical"),
        (m.ids(["Husband", "Not-in-family", "Own-child", "Unmarried", "Wife"], 0.5), "categorical"),
        (m.ids(["White", "Black", "Asian-Pac-Islander", "Other"], 0.2), "categorical"),
        (m.ids(["Male", "Female"], 0.4), "categorical"),
        (
            np.where(
                m.random.random(m.rows) < 0.08,
                m.random.choice([2174, 5178, 7688, 15024], m.rows),
                0,
            ),
            "numeric",
        ),
        (
            np.where(
                m.random.random(m.rows) < 0.05, m.random.choice([1602, 1902, 1977], m.rows), 0
            ),
            "numeric",
        ),
        (np.clip(m.normal(40, 12, 0, 0.6), 1, 99), "numeric"),
        (
            m.gone(
                m.ids(["United-States", "Mexico", "Philippines", "Germany", "Cuba"], 0.2), 0.02, "?"
            ),
            "categorical",
        ),
        (Outcome(0.24, "<=50K", ">50K"), "label >50K"),
    ]
    return m.log(dict(zip(names, columns, strict=True)), padded=True, **form)


def census(m: Maker) -> Log:
    """The census without a header."""
    return _census(m, [f"c{i}" for i in range(15)], header=False)


def census_named(m: Maker) -> Log:
    """The census with a header."""
    names = (
        "age workclass fnlwgt education education-num marital-status occupation relationship"
        " race sex"
    )
    return _census(
        m,
        [
            *names.split(),
            "capital-gain",
            "capital-loss",
            "hours-per-week",
            "native-country",
            "income",
        ],
    )


def bank_calls(m: Maker) -> Log:
    """Calls of a bank: semicolons, 999 days for never, an answer named y."""
    columns = {
        "age": (m.trend(m.random.integers(18, 88, m.rows), 0.3), "numeric"),
        "job": (
            m.ids(["admin.", "blue-collar", "technician", "services", "retired", "unknown"], 0.4),
            "categorical",
        ),
        "marital": (m.ids(["married", "single", "divorced"], 0.2), "categorical"),
        "default": (m.ids(["no", "unknown", "yes"], 0.4), "categorical"),
        "balance": (m.normal(1400, 2500, 0), "numeric"),
        "housing": (m.ids(["yes", "no"], 0.3), "categorical"),
        "contact": (m.ids(["cellular", "telephone"], 0.4), "categorical"),
        "day": (m.random.integers(1, 32, m.rows), "categorical or numeric"),
        "month": (m.ids(["jan", "mar", "may", "jul", "aug", "nov"], 0.4), "categorical"),
        "duration": (m.amounts(180.0, 0.8, 0, 1.2), "numeric"),
        "campaign": (m.counts(2.5, 1), "numeric"),
        "pdays": (m.gone(m.random.integers(1, 28, m.rows), 0.9, 999), "numeric"),
        "previous": (m.counts(0.3), "numeric"),
        "poutcome": (m.ids(["nonexistent", "failure", "success"], 0.8), "categorical"),
        "emp.var.rate": (m.ids([1.1, 1.4, -0.1, -1.8, -2.9], 0.6), "numeric"),
        "y": (Outcome(0.12, "no", "yes"), "label yes"),
    }
    return m.log(columns, delimiter=";")


def churn(m: Maker) -> Log:
    """Customers of a telephone company: yes and no, blanks in a column of amounts."""
    columns = {
        "customerID": (m.unique("{:05d}-VHVEG", 0, 99_999), "ignore"),
        "gender": (m.ids(["Female", "Male"], 0.1), "categorical"),
        "SeniorCitizen": (m.ids([0, 1], 0.3), "categorical"),
        "Partner": (m.ids(YES_NO, 0.3), "categorical"),
        "tenure": (m.trend(m.random.integers(0, 73, m.rows), -1.0), "numeric"),
        "PhoneService": (m.ids(YES_NO, 0.2), "categorical"),
        "MultipleLines": (m.ids([*YES_NO, "No phone service"], 0.2), "categorical"),
        "InternetService": (m.ids(["DSL", "Fiber optic", "No"], 0.6), "categorical"),
        "Contract": (m.ids(["Month-to-month", "One year", "Two year"], 0.9), "categorical"),
        "PaymentMethod": (
            m.ids(["Electronic check", "Mailed check", "Credit card (automatic)"], 0.4),
            "categorical",
        ),
        "MonthlyCharges": (m.normal(64, 25, 2), "numeric"),
        "TotalCharges": (m.gone(m.amounts(1400.0), 0.005, " "), "numeric"),
        "customer_service_calls": (m.counts(1.5), "numeric"),
        "area_code": (m.ids([408, 415, 510], 0.2), "categorical"),
        "Churn": (Outcome(0.26, "No", "Yes"), "label Yes"),
    }
    return m.log(columns)


def loans(m: Maker) -> Log:
    """Loans: months as text, percent signs, cut zip codes, an outcome in words."""
    columns = {
        "id": (m.unique("{}", 1_000_000, 9_000_000), "ignore"),
        "loan_amnt": (25 * (m.amounts(12_000.0, 0.6, 0) // 25), "numeric"),
        "term": (m.ids([" 36 months", " 60 months"], 0.5), "categorical"),
        "int_rate": ([f"{x:.2f}%" for x in m.normal(13, 4, 2)], "numeric"),
        "sub_grade": (m.ids([f"{a}{i}" for a in "ABCDE" for i in range(1, 6)], 0.4), "categorical"),
        "emp_length": (
            m.gone(m.ids(["< 1 year", "1 year", "2 years", "5 years", "10+ years"], 0.2), 0.05),
            "categorical",
        ),
        "home_ownership": (m.ids(["RENT", "OWN", "MORTGAGE"], 0.3), "categorical"),
        "annual_inc": (m.amounts(65_000.0, 0.5), "numeric"),
        "issue_d": (spelled(m.moments("2014-01-01", 700), "%b-%Y"), "time %b-%Y"),
        "purpose": (
            m.ids(["debt_consolidation", "credit_card", "car", "wedding", "medical"], 0.3),
            "categorical",
        ),
        "zip_code": (m.ids([f"{x}xx" for x in range(900, 990)], 0.3), "categorical"),
        "addr_state": (m.ids(STATES, 0.3), "categorical"),
        "dti": (m.normal(18, 8, 2), "numeric"),
        "delinq_2yrs": (m.counts(0.4), "numeric"),
        "inq_last_6mths": (m.counts(0.8), "numeric"),
        "open_acc": (m.counts(10, 1), "numeric"),
        "mths_since_last_delinq": (m.gone(m.random.integers(0, 90, m.rows), 0.5), "numeric"),
        "fico_range_low": (m.trend(5 * m.random.integers(132, 168, m.rows), -0.9), "numeric"),
        "loan_status": (Outcome(0.18, "Fully Paid", "Charged Off"), "label Charged Off"),
    }
    return m.log(columns)


def drivers(m: Maker) -> Log:
    """Insured drivers: names of few words that end in bin and cat, -1 for missing."""
    columns = {
        "id": (np.sort(m.random.choice(1_488_027, m.rows, replace=False)), "ignore"),
        "target": (Outcome(0.08), "label"),
        "ps_ind_01": (m.random.integers(0, 8, m.rows), "categorical or numeric"),
        "ps_ind_02_cat": (m.gone(m.ids(4, 0.4), 0.01, -1), "categorical"),
        "ps_ind_03": (m.trend(m.random.integers(0, 12, m.rows), 0.4), "categorical or numeric"),
        "ps_ind_06_bin": (m.ids([0, 1], 0.3), "categorical"),
        "ps_reg_03": (m.gone(m.normal(0.9, 0.3, 6), 0.15, -1.0), "numeric"),
        "ps_car_01_cat": (m.ids(12, 0.4, first=0), "categorical"),
        "ps_car_11_cat": (m.ids(104, 0.4), "categorical"),
        "ps_car_13": (m.amounts(0.8, 0.3, 6), "numeric"),
        "ps_calc_01": (np.round(m.random.random(m.rows), 1), "numeric"),
    }
    return m.log(columns)


def claims_german(m: Maker) -> Log:
    """A German insurer's export: semicolons, decimal commas, days first, zip codes with a zero
    before them.
    """

    def comma(x_N: np.ndarray) -> list[str]:
        return [f"{x:.2f}".replace(".", ",") for x in x_N]

    columns = {
        "Vertragsnummer": (m.unique("V{:07d}", 0, 9_999_999), "ignore"),
        "Datum": (spelled(m.moments("2019-02-01", 200), "%d.%m.%Y"), "time %d.%m.%Y"),
        "PLZ": (m.ids([f"{x:05d}" for x in range(1067, 99_000, 700)], 0.4), "categorical"),
        "Beitrag": (comma(m.amounts(600.0)), "numeric"),
        "Kilometer": (m.amounts(12_000.0, 0.5, 0), "numeric"),
        "Fahrzeugalter": (m.counts(8), "numeric"),
        "Hersteller": (
            m.ids(["VW", "BMW", "Opel", "Ford", "Škoda", "Citroën"], 0.4),
            "categorical",
        ),
        "Anzahl_Kinder": (
            m.random.choice(5, m.rows, p=[0.5, 0.2, 0.2, 0.07, 0.03]),
            "numeric or categorical",
        ),
        "Tarif": (m.ids(["A", "B", "C"], 0.4), "categorical"),
        "Schaden": (Outcome(0.15, "nein", "ja"), "label ja"),
    }
    return m.log(columns, delimiter=";")


def heart(m: Maker) -> Log:
    """Patients with coded findings, ? for missing ones, and few rows."""
    columns = {
        "age": (m.trend(m.random.integers(29, 78, m.rows)), "numeric"),
        "sex": (m.ids([0, 1], 0.5), "categorical"),
        "cp": (m.ids(4, 0.8), "categorical or numeric"),
        "trestbps": (m.normal(131, 17, 0), "numeric"),
        "chol": (m.normal(246, 50, 0), "numeric"),
        "fbs": (m.ids([0, 1], 0.2), "categorical"),
        "restecg": (m.ids(3, 0.3, first=0), "categorical"),
        "thalach": (m.normal(150, 22, 0, -0.8), "numeric"),
        "exang": (m.ids([0, 1], 0.6), "categorical"),
        "oldpeak": (np.abs(m.normal(1, 1, 1, 0.7)), "numeric"),
        "ca": (
            m.gone(m.trend(m.random.integers(0, 4, m.rows)), 0.01, "?"),
            "categorical or numeric",
        ),
        "thal": (m.gone(m.ids([3, 6, 7], 0.8), 0.01, "?"), "categorical"),
        "num": (Outcome(0.45), "label"),
    }
    return m.log(columns)


def readmissions(m: Maker) -> Log:
    """Stays in hospitals: ranges as text, codes that look like numbers, counts with names."""
    diagnoses = ["428", "250.83", "414", "V57", "786", "410", "486", "E909", "276", "38"]
    ages = [f"[{10 * i}-{10 * i + 10})" for i in range(10)]
    columns = {
        "encounter_id": (m.unique("{}", 2_000_000, 9_000_000), "ignore"),
        "patient_nbr": (m.codes(2000, 100_000, 90_000_000, 0.2), "categorical"),
        "race": (
            m.gone(m.ids(["Caucasian", "AfricanAmerican", "Asian"], 0.2), 0.02, "?"),
            "categorical",
        ),
        "age": (m.ids(ages, 0.4), "categorical"),
        "weight": (
            m.gone(m.ids(["[50-75)", "[75-100)", "[100-125)"], 0.2), 0.97, "?"),
            "categorical",
        ),
        "admission_type_id": (m.ids(8, 0.3), "categorical"),
        "time_in_hospital": (m.trend(m.random.integers(1, 15, m.rows)), "numeric"),
        "num_lab_procedures": (np.clip(m.normal(43, 19, 0), 1, 130), "numeric"),
        "num_medications": (m.counts(15, 1), "numeric"),
        "number_diagnoses": (m.trend(m.random.integers(1, 10, m.rows)), "numeric"),
        "number_inpatient": (m.counts(0.6), "numeric"),
        "diag_1": (m.ids(diagnoses, 0.5), "categorical"),
        "A1Cresult": (m.ids(["None", ">7", ">8", "Norm"], 0.3), "categorical"),
        "change": (m.ids(["Ch", "No"], 0.3), "categorical"),
        "diabetesMed": (m.ids(YES_NO, 0.3), "categorical"),
        "readmitted": (Outcome(0.4, "NO", "YES"), "label YES"),
    }
    return m.log(columns)


def payments(m: Maker) -> Log:
    """Payments on cards: long numbers of cards, names, birthdays, places, two times."""
    paid = m.moments("2019-01-01", 20)
    born = [
        f"{y}-{month:02}-{day:02}"
        for y, month, day in m.random.integers([1940, 1, 1], [2001, 13, 29], (400, 3))
    ]
    columns = {
        "": (np.arange(m.rows), "ignore"),
        "trans_date_trans_time": (spelled(paid, "%Y-%m-%d %H:%M:%S"), "time"),
        "cc_num": (_cards(m), "categorical"),
        "merchant": (
            m.ids([f"fraud_{a}, {b} and Sons" for a in NAMES for b in NAMES[:5]]),
            "categorical",
        ),
        "category": (
            m.ids(["gas_transport", "grocery_pos", "home", "shopping_net", "misc_pos"], 0.7),
            "categorical",
        ),
        "amt": (m.amounts(48.0, 1.1), "numeric"),
        "first": (m.ids(NAMES, 0.1), "categorical"),
        "gender": (m.ids(["F", "M"], 0.1), "categorical"),
        "street": (m.ids([f"{n} {s}" for n in range(1, 60) for s in STREETS], 0.1), "categorical"),
        "state": (m.ids(STATES, 0.2), "categorical"),
        "zip": (m.codes(380, 1012, 99_900, 0.1), "categorical"),
        "lat": (np.round(m.random.uniform(25, 49, m.rows), 4), "numeric"),
        "long": (np.round(m.random.uniform(-124, -67, m.rows), 4), "numeric"),
        "city_pop": (m.amounts(2500.0, 2.0, 0, 0.2), "numeric"),
        "job": (m.ids([f"{w.title()} officer" for w in WORDS], 0.2), "categorical"),
        "dob": (m.ids(born, 0.1), "time or ignore"),
        "trans_num": (m.unique("{:032x}", 10**17, 10**17 + 10**6), "ignore"),
        "unix_time": (seconds(paid), "time or ignore"),
        "merch_lat": (np.round(m.random.uniform(25, 49, m.rows), 6), "numeric"),
        "is_fraud": (Outcome(0.04), "label"),
    }
    return m.log(columns)


def _cards(m: Maker) -> np.ndarray:
    return m.ids((4 * 10**15 + m.random.integers(0, 10**15, 400)).tolist(), 0.3)


def transfers(m: Maker) -> Log:
    """Transfers of mobile money: steps of time, balances, an alarm that never rang."""
    columns = {
        "step": (np.sort(m.random.integers(1, 744, m.rows)), "time or numeric"),
        "type": (
            m.ids(["PAYMENT", "TRANSFER", "CASH_OUT", "DEBIT", "CASH_IN"], 0.9),
            "categorical",
        ),
        "amount": (m.amounts(75_000.0, 1.4), "numeric"),
        "nameOrig": (m.unique("C{}", 10**9, 10**9 + 10**6), "ignore"),
        "oldbalanceOrg": (m.gone(m.amounts(14_000.0, 1.8), 0.4, 0.0), "numeric"),
        "newbalanceOrig": (m.gone(m.amounts(12_000.0, 1.8), 0.5, 0.0), "numeric"),
        "nameDest": (m.ids([f"M{x}" for x in range(10**9, 10**9 + 700)]), "categorical"),
        "isFlaggedFraud": (np.zeros(m.rows, np.int64), "ignore"),
        "isFraud": (Outcome(0.03), "label"),
    }
    return m.log(columns)


def flights(m: Maker) -> Log:
    """Flights: parts of a date as numbers, clock times as hhmm, NA for missing ones, no name for
    the last column.
    """
    columns = {
        "YEAR": (np.full(m.rows, 2013), "ignore"),
        "MONTH": (m.random.integers(1, 13, m.rows), "categorical or numeric"),
        "DAY_OF_WEEK": (m.ids(7, 0.2), "categorical"),
        "FL_DATE": (spelled(m.moments("2013-01-01", 360), "%-m/%-d/%Y"), "time %m/%d/%Y"),
        "OP_CARRIER": (m.ids(["UA", "AA", "B6", "DL", "EV", "MQ"], 0.6), "categorical"),
        "TAIL_NUM": (
            m.gone(m.ids([f"N{x}UA" for x in range(100, 900, 2)], 0.3), 0.02, "NA"),
            "categorical",
        ),
        "FL_NUM": (m.codes(900, 1, 6000, 0.6), "categorical"),
        "ORIGIN": (m.ids(["EWR", "JFK", "LGA"], 0.4), "categorical"),
        "DEST": (
            m.ids([f"{a}{b}{c}" for a in "ABCD" for b in "LOT" for c in "XYZ"], 0.5),
            "categorical",
        ),
        "CRS_DEP_TIME": (
            m.trend(100 * m.random.integers(5, 24, m.rows) + 5 * m.random.integers(0, 12, m.rows)),
            "numeric",
        ),
        "DISTANCE": (m.amounts(900.0, 0.6, 0), "numeric"),
        "AIR_TIME": (m.gone(m.normal(150, 60, 0), 0.03, "NA"), "numeric"),
        "temp_c": (m.gone(m.normal(13, 9, 1), 0.05, -999.0), "numeric"),
        "ARR_DEL15": (Outcome(0.22, "N", "Y"), "label Y"),
    }
    return m.log(columns)


def students(m: Maker) -> Log:
    """Students who judged lecturers: whole numbers that name people, beside a number of the row."""
    columns = {
        "rownames": (np.arange(1, m.rows + 1), "ignore"),
        "s": (m.ids(900, 1.0), "categorical"),
        "d": (m.ids(600, 1.2), "categorical"),
        "studage": (m.ids([2, 4, 6, 8], 0.2), "categorical or numeric"),
        "lectage": (m.ids(6, 0.2), "categorical or numeric"),
        "service": (m.ids([0, 1], 0.3), "categorical"),
        "dept": (m.ids(14, 0.3), "categorical"),
        "y": (Scale([1, 2, 3, 4, 5]), "label"),
    }
    return m.log(columns)


def exams(m: Maker) -> Log:
    """Answers of students to exercises: integers of users and items in a dense range, no word for
    id in the names.
    """
    columns = {
        "student": (m.ids(1000, 1.3), "categorical"),
        "exercise": (m.ids(300, 1.3), "categorical"),
        "teacher": (m.ids(60, 0.8), "categorical"),
        "school": (m.ids(20, 0.5), "categorical"),
        "age": (m.trend(m.random.integers(11, 19, m.rows)), "numeric"),
        "number_of_attempts": (m.counts(2, 1), "numeric"),
        "hints": (m.counts(1), "numeric"),
        "grade_average": (m.normal(2.4, 0.6, 1), "numeric"),
        "answered_on": (
            spelled(m.moments("2021-09-03", 9), "%d/%m/%Y %H:%M"),
            "time %d/%m/%Y %H:%M",
        ),
        "correct": (Outcome(0.6, -1, 1), "label 1"),
    }
    return m.log(columns)


def police_stops(m: Maker) -> Log:
    """Stops by the police: several answers of yes and no, one of which is asked for."""
    problems = ["suspicious person", "traffic", "curfew"]
    columns = {
        "idNum": (m.unique("17-{:06d}", 0, 999_999), "ignore"),
        "date": (spelled(m.moments("2017-01-01", 300), "%Y-%m-%d %H:%M:%S"), "time"),
        "problem": (m.ids(problems, 0.5), "categorical"),
        "MDC": (m.ids(["MDC", "other"], 0.3), "categorical"),
        "citationIssued": (m.gone(m.ids(["NO", "YES"], 0.3), 0.4, "NA"), "categorical"),
        "preRace": (m.ids(["Unknown", "White", "Black", "Asian"], 0.3), "categorical"),
        "lat": (np.round(m.random.uniform(44.89, 45.05, m.rows), 5), "numeric"),
        "long": (np.round(m.random.uniform(-93.33, -93.2, m.rows), 5), "numeric"),
        "policePrecinct": (m.ids(5, 0.3), "categorical"),
        "neighborhood": (
            m.ids([f"{a} {b}" for a in ("East", "West", "North") for b in NAMES], 0.3),
            "categorical",
        ),
        "note": (m.prose(WORDS), "ignore"),
        "personSearch": (Outcome(0.2, "NO", "YES"), "label YES"),
    }
    return m.log(columns)


def lodgings(m: Maker) -> Log:
    """Rooms for rent: prices with a currency, t and f, JSON lists, dates of other things."""
    amenities = ["Wifi", "TV", "Kitchen", "Heating", "Washer", "Pool", "Free parking", "Iron"]
    reviewed = m.gone(
        m.random.permutation(np.array(spelled(m.moments("2018-01-01", 500), "%Y-%m-%d"))), 0.2
    )
    columns = {
        "listing_id": (m.unique("{}", 2000, 40_000_000), "ignore"),
        "host_id": (m.codes(900, 1000, 90_000_000, 0.4), "categorical"),
        "host_is_superhost": (m.ids(["t", "f"], 0.4), "categorical"),
        "last_review": (reviewed, "time or ignore"),
        "description": (m.prose(WORDS, 9, 18), "ignore"),
        "zipcode": (m.ids([f"{x:05d}" for x in range(2108, 2140)], 0.3), "categorical"),
        "latitude": (np.round(m.random.uniform(42.23, 42.39, m.rows), 5), "numeric"),
        "longitude": (np.round(m.random.uniform(-71.17, -71.0, m.rows), 5), "numeric"),
        "room_type": (
            m.ids(["Entire home/apt", "Private room", "Shared room"], 0.5),
            "categorical",
        ),
        "accommodates": (m.counts(3, 1), "numeric"),
        "bathrooms": (m.trend(m.random.integers(2, 7, m.rows) / 2, 0.3), "numeric"),
        "bedrooms": (m.counts(1.3), "numeric"),
        "amenities": ([json.dumps(x) for x in m.lists(amenities, 6)], "list json"),
        "price": ([f"${x:,.2f}" for x in m.amounts(140.0)], "numeric"),
        "minimum_nights": (m.counts(3, 1), "numeric"),
        "number_of_reviews": (m.counts(25), "numeric"),
        "year_built": (m.trend(m.random.integers(1880, 2020, m.rows), 0.3), "numeric"),
        "instant_bookable": (m.ids(["t", "f"], 0.3), "categorical"),
        "is_booked": (Outcome(0.35, "f", "t"), "label t"),
    }
    return m.log(columns)


def collisions(m: Maker) -> Log:
    """Simulated collisions of particles: -999 for what is not there, a weight, letters for signal
    and background.
    """
    columns = {
        "EventId": (np.arange(100_000, 100_000 + m.rows), "ignore"),
        "DER_mass_MMC": (m.gone(m.normal(121, 40, 3), 0.15, -999.0), "numeric"),
        "DER_mass_vis": (m.amounts(80.0, 0.4, 3), "numeric"),
        "DER_deltaeta_jet_jet": (m.gone(m.amounts(2.0, 0.5, 3), 0.7, -999.0), "numeric"),
        "PRI_tau_eta": (m.normal(0, 1.2, 3), "numeric"),
        "PRI_jet_num": (
            m.random.choice(4, m.rows, p=[0.4, 0.3, 0.2, 0.1]),
            "numeric or categorical",
        ),
        "Weight": (np.round(np.exp(m.random.normal(0, 1, m.rows)), 6), "weight"),
        "Label": (Outcome(0.34, "b", "s"), "label s"),
    }
    return m.log(columns)


def campaigns(m: Maker) -> Log:
    """A trial of advertising: numbers without names, a treatment, two outcomes."""
    columns = {
        **{f"f{i}": (m.normal(5 * i, 1 + i, 4, 0.3), "numeric") for i in range(6)},
        "treatment": (m.ids([0, 1], 0.3), "categorical"),
        "conversion": (Outcome(0.02), "label"),
        "visit": (Outcome(0.06), "label or ignore"),
    }
    return m.log(columns)


def page_views(m: Maker) -> Log:
    """Views of pages: days first, sizes of screens, addresses, browsers, seconds with a
    fraction.
    """
    agents = [f"Mozilla/5.0 (X11; Linux {i}) Gecko/{20 + i}.0" for i in range(25)]
    columns = {
        "datum": (spelled(m.moments("2020-02-04", 25), "%d/%m/%Y %H:%M"), "time %d/%m/%Y %H:%M"),
        "visitor": (m.hexes(800, 16), "categorical"),
        "page": (m.ids([f"/shop/{w}?id={i}" for i, w in enumerate(WORDS * 4)], 0.6), "categorical"),
        "referrer": (
            m.gone(m.ids(["search.example", "news.example", "mail.example"], 0.4), 0.4),
            "categorical",
        ),
        "user_agent": (m.ids(agents, 0.2), "categorical"),
        "screen": (m.ids(["1920x1080", "1366x768", "390x844", "414x896"], 0.3), "categorical"),
        "ip_address": (
            m.ids([f"10.{a}.{b}.{a ^ b}" for a in range(30) for b in range(30)], 0.2),
            "categorical",
        ),
        "hour": (m.random.integers(0, 24, m.rows), "categorical or numeric"),
        "seconds_on_page": (m.amounts(40.0, 1.0, 1), "numeric"),
        "pages_seen": (m.counts(5, 1), "numeric"),
        "scroll_depth": (m.trend(m.random.integers(0, 101, m.rows)), "numeric"),
        "ab_group": (m.ids(["control", "variant"], 0.2), "categorical"),
        "conversion": (Outcome(0.07, "false", "true"), "label"),
    }
    return m.log(columns)


LOGS: tuple[Made, ...] = (
    *(
        census,
        census_named,
        bank_calls,
        churn,
        loans,
        drivers,
        claims_german,
        heart,
        readmissions,
        payments,
    ),
    *(
        transfers,
        flights,
        students,
        exams,
        police_stops,
        lodgings,
        collisions,
        campaigns,
        page_views,
    ),
)
